/* AVX2: widen_scales_template.h. */
#include "vectors_avx2.h"
#include "widen_scales_template.h"
