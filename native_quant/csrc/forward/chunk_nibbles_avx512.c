/* AVX-512: chunk_nibbles_template.h. */
#include "nibbles_avx512.h"

#include "chunk_nibbles_template.h"
