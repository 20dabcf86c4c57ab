/* AVX2: lay_mxfp4_template.h. */
#include "vectors_avx2.h"
#include "lay_mxfp4_template.h"
