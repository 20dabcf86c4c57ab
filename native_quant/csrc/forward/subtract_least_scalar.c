/* Subtracts the least values of groups of columns, times sums of activations, from sums of products. */
#include <math.h>

#include "kernels.h"

void kt_subtract_least_scalar(int64_t m, int64_t groups, const float *least, const float *sums, int64_t sums_pitch,
                              float *c) {
    for (int64_t t = 0; t < m; t++)
        for (int64_t g = 0; g < groups; g++)
            for (int64_t r = 0; r < KT_PANEL_ROWS; r++) {
                float *sum = &c[t * KT_PANEL_ROWS + r];
                *sum = fmaf(-least[g * KT_PANEL_ROWS + r], sums[t * sums_pitch + g], *sum);
            }
}
