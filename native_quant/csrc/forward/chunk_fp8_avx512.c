/* AVX-512: chunk_fp8_template.h. */
#include "vectors_avx512.h"
#include "chunk_fp8_template.h"
