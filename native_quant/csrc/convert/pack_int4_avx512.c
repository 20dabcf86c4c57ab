/* AVX-512: pack_int4_template.h. */
#include "vectors_avx512.h"
#include "pack_int4_template.h"
