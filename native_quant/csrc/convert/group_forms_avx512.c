/* AVX-512: group_forms_template.h. */
#include "vectors_avx512.h"
#include "group_forms_template.h"
