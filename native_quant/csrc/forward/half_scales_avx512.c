/* AVX-512: half_scales_template.h. */
#include "vectors_avx512.h"
#include "half_scales_template.h"
