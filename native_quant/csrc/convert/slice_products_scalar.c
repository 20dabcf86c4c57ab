/* Subtracts the errors of some columns from others: the definition, a value at a time. */
#include <math.h>

#include "kernels.h"

void kt_slice_products_scalar(int64_t count, const float *slice, const float *from, float *to) {
    for (int64_t i = 0; i < count; i++, slice += KTQ_SLICE_COLUMNS, from += KT_PANEL_ROWS)
        for (int c = 0; c < KTQ_SLICE_COLUMNS; c++)
            for (int r = 0; r < KT_PANEL_ROWS; r++) {
                float *x = to + c * KT_PANEL_ROWS + r;
                *x = fmaf(-from[r], slice[c], *x);
            }
}
