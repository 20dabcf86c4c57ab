/* AVX-512: decode_blocks_template.h. */
#include "lookup_avx512.h"
#include "decode_blocks_template.h"
