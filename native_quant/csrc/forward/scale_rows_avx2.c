/* AVX2: scale_rows_template.h. */
#include "vectors_avx2.h"
#include "scale_rows_template.h"
