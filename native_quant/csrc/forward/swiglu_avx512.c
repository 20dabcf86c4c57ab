/* AVX-512: swiglu_template.h. */
#include "vectors_avx512.h"
#include "swiglu_template.h"
