/* AVX2: pack_codes_template.h. */
#include "vectors_avx2.h"
#include "pack_codes_template.h"
