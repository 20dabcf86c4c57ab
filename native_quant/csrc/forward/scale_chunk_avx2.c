/* AVX2: scale_chunk_template.h. */
#include "vectors_avx2.h"
#include "scale_chunk_template.h"
