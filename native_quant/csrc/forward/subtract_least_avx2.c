/* AVX2: subtract_least_template.h. */
#include "vectors_avx2.h"
#include "subtract_least_template.h"
