/* AVX2: merge_template.h. */
#include "vectors_avx2.h"
#include "merge_template.h"
