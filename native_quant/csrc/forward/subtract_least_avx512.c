/* AVX-512: subtract_least_template.h. */
#include "vectors_avx512.h"
#include "subtract_least_template.h"
