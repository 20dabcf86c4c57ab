/* AVX-512: add_scaled_template.h. */
#include "vectors_avx512.h"
#include "add_scaled_template.h"
