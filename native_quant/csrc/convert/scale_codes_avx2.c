/* AVX2: scale_codes_template.h. */
#include "vectors_avx2.h"
#include "scale_codes_template.h"
