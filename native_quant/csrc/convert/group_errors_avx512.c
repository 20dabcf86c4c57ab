/* AVX-512: group_errors_template.h. */
#include "vectors_avx512.h"
#include "group_errors_template.h"
