/* AVX-512: swiglu_bf16_template.h. */
#include "vectors_avx512.h"
#include "swiglu_bf16_template.h"
