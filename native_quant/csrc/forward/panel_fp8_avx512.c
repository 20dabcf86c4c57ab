/* AVX-512: panel_fp8_template.h. */
#include "vectors_avx512.h"
#include "panel_fp8_template.h"
