/* AVX2: plain_row_template.h. */
#include "vectors_avx2.h"
#include "plain_row_template.h"
