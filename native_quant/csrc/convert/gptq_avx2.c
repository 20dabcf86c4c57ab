/* AVX2: gptq_template.h. */
#include "vectors_avx2.h"
#include "gptq_template.h"
