/* AVX2: pack_int8_template.h. */
#include "vectors_avx2.h"
#include "pack_int8_template.h"
