/* AVX2: amax_template.h. */
#include "vectors_avx2.h"
#include "amax_template.h"
