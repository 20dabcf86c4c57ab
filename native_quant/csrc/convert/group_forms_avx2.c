/* AVX2: group_forms_template.h. */
#include "vectors_avx2.h"
#include "group_forms_template.h"
