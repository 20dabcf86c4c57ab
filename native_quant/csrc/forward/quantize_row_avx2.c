/* AVX2: quantize_row_template.h. */
#include "vectors_avx2.h"
#include "quantize_row_template.h"
