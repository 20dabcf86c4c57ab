/* AVX-512: scale_rows_template.h. */
#include "vectors_avx512.h"
#include "scale_rows_template.h"
