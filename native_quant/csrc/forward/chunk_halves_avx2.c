/* AVX2: chunk_halves_template.h. */
#include "vectors_avx2.h"
#include "chunk_halves_template.h"
