/* AVX2: swiglu_backward_template.h. */
#include "vectors_avx2.h"
#include "swiglu_backward_template.h"
