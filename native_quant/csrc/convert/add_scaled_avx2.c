/* AVX2: add_scaled_template.h. */
#include "vectors_avx2.h"
#include "add_scaled_template.h"
