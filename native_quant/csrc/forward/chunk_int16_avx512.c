/* AVX-512: chunk_int16_template.h. */
#include "vectors_avx512.h"
#include "chunk_int16_template.h"
