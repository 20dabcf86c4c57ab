/* AVX2: chunk_fp8_template.h. */
#include "vectors_avx2.h"
#include "chunk_fp8_template.h"
