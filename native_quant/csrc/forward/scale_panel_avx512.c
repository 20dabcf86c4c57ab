/* AVX-512: scale_panel_template.h. */
#include "vectors_avx512.h"
#include "scale_panel_template.h"
