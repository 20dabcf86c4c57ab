/* AVX-512: outer_sums_template.h. */
#include "vectors_avx512.h"
#include "outer_sums_template.h"
