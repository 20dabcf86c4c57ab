/* AVX2: pack_int4_template.h. */
#include "vectors_avx2.h"
#include "pack_int4_template.h"
