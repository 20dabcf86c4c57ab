/* AVX2: interleave_template.h. */
#include "vectors_avx2.h"
#include "interleave_template.h"
