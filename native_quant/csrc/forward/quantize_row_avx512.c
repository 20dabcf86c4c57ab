/* AVX-512: quantize_row_template.h. */
#include "vectors_avx512.h"
#include "quantize_row_template.h"
