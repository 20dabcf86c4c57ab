/* AVX2: scale_panel_template.h. */
#include "vectors_avx2.h"
#include "scale_panel_template.h"
