/* The weighted sum of a token's experts, in the router's order. */
#include <math.h>

#include "kernels.h"

void kt_combine_scalar(int64_t terms, const float *const *rows, const float *weights, int64_t columns, float *out) {
    for (int64_t c = 0; c < columns; c++) {
        float sum = 0;
        for (int64_t i = 0; i < terms; i++) sum = fmaf(rows[i][c], weights[i], sum);
        out[c] = sum;
    }
}
