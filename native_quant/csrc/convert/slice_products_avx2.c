/* AVX2: slice_products_template.h. */
#include "vectors_avx2.h"
#include "slice_products_template.h"
