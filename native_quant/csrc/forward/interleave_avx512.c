/* AVX-512: interleave_template.h. */
#include "vectors_avx512.h"
#include "interleave_template.h"
