/* AVX-512: swiglu_backward_template.h. */
#include "vectors_avx512.h"
#include "swiglu_backward_template.h"
