/* AVX2: combine_template.h. */
#include "vectors_avx2.h"
#include "combine_template.h"
