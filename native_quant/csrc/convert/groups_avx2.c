/* AVX2: groups_template.h. */
#include "vectors_avx2.h"
#include "groups_template.h"
