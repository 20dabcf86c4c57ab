/* AVX2: strip_products_template.h. */
#include "vectors_avx2.h"
#include "strip_products_template.h"
