/* AVX2: chunk_int16_template.h. */
#include "vectors_avx2.h"
#include "chunk_int16_template.h"
