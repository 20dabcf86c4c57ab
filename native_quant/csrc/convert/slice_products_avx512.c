/* AVX-512: slice_products_template.h. */
#include "vectors_avx512.h"
#include "slice_products_template.h"
