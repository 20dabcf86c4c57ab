/* AVX-512: pack_codes_template.h. */
#include "vectors_avx512.h"
#include "pack_codes_template.h"
