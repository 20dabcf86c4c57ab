/* AVX-512: lay_mxfp4_template.h. */
#include "vectors_avx512.h"
#include "lay_mxfp4_template.h"
