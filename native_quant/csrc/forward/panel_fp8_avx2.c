/* AVX2: panel_fp8_template.h. */
#include "vectors_avx2.h"
#include "panel_fp8_template.h"
