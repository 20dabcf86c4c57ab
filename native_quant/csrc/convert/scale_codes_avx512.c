/* AVX-512: scale_codes_template.h. */
#include "vectors_avx512.h"
#include "scale_codes_template.h"
