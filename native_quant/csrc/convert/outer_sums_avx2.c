/* AVX2: outer_sums_template.h. */
#include "vectors_avx2.h"
#include "outer_sums_template.h"
