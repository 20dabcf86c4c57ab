/* AVX2: transpose_tile_template.h. */
#include "vectors_avx2.h"
#include "transpose_tile_template.h"
