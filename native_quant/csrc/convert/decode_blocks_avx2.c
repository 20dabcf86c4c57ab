/* AVX2: decode_blocks_template.h. */
#include "lookup_avx2.h"
#include "decode_blocks_template.h"
