/* AVX-512: strip_products_template.h. */
#include "vectors_avx512.h"
#include "strip_products_template.h"
