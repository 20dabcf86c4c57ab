/* AVX-512: reorder_mxfp4_template.h. */
#include "vectors_avx512.h"
#include "reorder_mxfp4_template.h"
