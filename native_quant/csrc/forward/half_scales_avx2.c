/* AVX2: half_scales_template.h. */
#include "vectors_avx2.h"
#include "half_scales_template.h"
