/* AVX-512: groups_template.h. */
#include "vectors_avx512.h"
#include "groups_template.h"
