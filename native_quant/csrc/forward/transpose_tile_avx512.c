/* AVX-512: transpose_tile_template.h. */
#include "vectors_avx512.h"
#include "transpose_tile_template.h"
