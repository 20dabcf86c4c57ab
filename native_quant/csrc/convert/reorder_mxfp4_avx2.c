/* AVX2: reorder_mxfp4_template.h. */
#include "vectors_avx2.h"
#include "reorder_mxfp4_template.h"
