/* AVX-512: transpose_template.h. */
#include "vectors_avx512.h"
#include "transpose_template.h"
