/* AVX2: chunk_nibbles_template.h. */
#include "nibbles_avx2.h"

#include "chunk_nibbles_template.h"
