/* Products of rows of BF16 weights with activations as they are defined (numerics.md, section 5e). */
#include <math.h>

#include "bf16.h"
#include "kernels.h"

static float multiply_row(const uint8_t *row, const uint16_t *x, int64_t k) {
    float sum[KT_SUM_LANES] = {0};
    for (int64_t j = 0; j < k; j += 2) {
        float *lane = &sum[j / 2 % KT_SUM_LANES];
        *lane = fmaf(kt_from_bf16(kt_load16(row + 2 * j + 2)), kt_from_bf16(x[j + 1]), *lane);
        *lane = fmaf(kt_from_bf16(kt_load16(row + 2 * j)), kt_from_bf16(x[j]), *lane);
    }
    return kt_add_lanes(sum);
}

void kt_row_products_scalar(const kt_row_products *job) {
    for (int64_t r = 0; r < job->rows; r++)
        for (int64_t t = 0; t < job->m; t++)
            job->out[r * job->m + t] = multiply_row(job->weight + 2 * r * job->k, job->x + t * job->k, job->k);
}
