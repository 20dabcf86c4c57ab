/* The remainder of a coarse row after int8 codes, as a second row of int8 codes (numerics.md, section 5). */
#include <math.h>

#include "bf16.h"
#include "kernels.h"

void kt_remainder_scalar(const float *x, int64_t k, float scale, float step, kt_code_row q, int8_t *q2,
                         int32_t *sums) {
    float reciprocal = 1.0f / step;
    for (int64_t first = 0; first < k; first += KT_K_BLOCK) {
        int32_t sum = 0;
        for (int64_t j = first; j < k && j < first + KT_K_BLOCK; j++) {
            int64_t at = j / 64 * q.pitch + j % 64;
            float product = fmaf(-(float)q.q[at], scale, x[j]) * reciprocal;
            q2[at] = (int8_t)(kt_bits(product + 0x1.8p23f) - kt_bits(0x1.8p23f));
            sum += q2[at];
        }
        sums[first / KT_K_BLOCK] = sum;
    }
}
