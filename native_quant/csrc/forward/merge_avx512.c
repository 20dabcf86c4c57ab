/* AVX-512: merge_template.h. */
#include "vectors_avx512.h"
#include "merge_template.h"
