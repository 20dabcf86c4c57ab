/* AVX2: remainder_template.h. */
#include "vectors_avx2.h"
#include "remainder_template.h"
