/* AVX-512: combine_template.h. */
#include "vectors_avx512.h"
#include "combine_template.h"
