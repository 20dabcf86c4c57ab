/* AVX-512: remainder_template.h. */
#include "vectors_avx512.h"
#include "remainder_template.h"
