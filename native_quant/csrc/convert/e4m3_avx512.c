/* AVX-512: e4m3_template.h. */
#include "vectors_avx512.h"
#include "e4m3_template.h"
