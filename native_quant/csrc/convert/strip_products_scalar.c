/* What the errors of some columns take from others: the definition, a value at a time. */
#include <math.h>

#include "kernels.h"

void kt_strip_products_scalar(int64_t count, const float *strip, const float *from, float *to) {
    for (int64_t i = 0; i < count; i++, strip += KTQ_STRIP_COLUMNS, from += KT_PANEL_ROWS)
        for (int c = 0; c < KTQ_STRIP_COLUMNS; c++)
            for (int r = 0; r < KT_PANEL_ROWS; r++) {
                float *x = to + c * KT_PANEL_ROWS + r;
                *x = fmaf(-from[r], strip[c], *x);
            }
}
