/* AVX-512: decode_template.h. */
#include "vectors_avx512.h"
#include "decode_template.h"
