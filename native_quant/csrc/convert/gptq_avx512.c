/* AVX-512: gptq_template.h. */
#include "vectors_avx512.h"
#include "gptq_template.h"
