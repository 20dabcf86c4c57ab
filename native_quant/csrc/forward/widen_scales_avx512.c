/* AVX-512: widen_scales_template.h. */
#include "vectors_avx512.h"
#include "widen_scales_template.h"
