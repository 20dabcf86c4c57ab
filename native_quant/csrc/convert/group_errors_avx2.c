/* AVX2: group_errors_template.h. */
#include "vectors_avx2.h"
#include "group_errors_template.h"
