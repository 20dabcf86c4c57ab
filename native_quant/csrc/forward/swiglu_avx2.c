/* AVX2: swiglu_template.h. */
#include "vectors_avx2.h"
#include "swiglu_template.h"
