/* AVX-512: pack_int8_template.h. */
#include "vectors_avx512.h"
#include "pack_int8_template.h"
