/* AVX2: decode_template.h. */
#include "vectors_avx2.h"
#include "decode_template.h"
