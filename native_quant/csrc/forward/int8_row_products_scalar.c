/* Products of rows of int8 weights with activations as they are defined (numerics.md, section 5e). */
#include <math.h>

#include "bf16.h"
#include "kernels.h"

static float multiply_row(const int8_t *codes, const uint8_t *scales, const int16_t *x, int64_t k) {
    float sum[KT_SUM_LANES] = {0};
    for (int64_t j = 0; j < k; j += 2) {
        float *lane = &sum[j / 2 % KT_SUM_LANES];
        const int32_t pair = codes[j] * x[j] + codes[j + 1] * x[j + 1];
        *lane = fmaf((float)pair, kt_from_bf16(kt_load16(scales + 2 * (j / KTQ_ROW_MULTIPLE))), *lane);
    }
    return kt_add_lanes(sum);
}

void kt_int8_row_products_scalar(const kt_int8_row_products *job) {
    for (int64_t r = 0; r < job->rows; r++) {
        const uint8_t *scales = job->scales + 2 * r * (job->k / KTQ_ROW_MULTIPLE);
        for (int64_t t = 0; t < job->m; t++)
            job->out[r * job->m + t] = multiply_row(job->codes + r * job->k, scales, job->x + t * job->k, job->k);
    }
}
