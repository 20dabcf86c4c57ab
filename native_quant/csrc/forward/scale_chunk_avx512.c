/* AVX-512: scale_chunk_template.h. */
#include "vectors_avx512.h"
#include "scale_chunk_template.h"
