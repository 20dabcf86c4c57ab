/* AVX2: e4m3_template.h. */
#include "vectors_avx2.h"
#include "e4m3_template.h"
