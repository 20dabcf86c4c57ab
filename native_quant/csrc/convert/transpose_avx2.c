/* AVX2: transpose_template.h. */
#include "vectors_avx2.h"
#include "transpose_template.h"
