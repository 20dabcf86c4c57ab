/* AVX-512: amax_template.h. */
#include "vectors_avx512.h"
#include "amax_template.h"
