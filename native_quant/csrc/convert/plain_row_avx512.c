/* AVX-512: plain_row_template.h. */
#include "vectors_avx512.h"
#include "plain_row_template.h"
