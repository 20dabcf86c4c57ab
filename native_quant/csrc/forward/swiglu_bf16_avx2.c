/* AVX2: swiglu_bf16_template.h. */
#include "vectors_avx2.h"
#include "swiglu_bf16_template.h"
