/* AVX-512: chunk_halves_template.h. */
#include "vectors_avx512.h"
#include "chunk_halves_template.h"
