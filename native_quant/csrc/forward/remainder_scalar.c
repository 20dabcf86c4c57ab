/* The remainder of a coarse row after int8 codes, as a second row of int8 codes (NUMERICS.md, section 5). */
#include <math.h>

#include "bf16.h"
#include "kernels.h"

float kt_remainder_scalar(const float *x, int64_t k, float scale, const int8_t *q, int8_t *q2, int32_t *sums) {
    int64_t energy = 0;
    for (int64_t j = 0; j < k; j++) energy += q[j] * q[j];
    float fine = scale * KT_REMAINDER_UNIT;
    if (!(fine > 0) || energy >= KT_COARSE_ENERGY * k) return 0;
    float reciprocal = 1.0f / fine;
    for (int64_t first = 0; first < k; first += KT_K_BLOCK) {
        int32_t sum = 0;
        for (int64_t j = first; j < k && j < first + KT_K_BLOCK; j++) {
            float product = fmaf(-(float)q[j], scale, x[j]) * reciprocal;
            q2[j] = (int8_t)(kt_bits(product + 0x1.8p23f) - kt_bits(0x1.8p23f));
            sum += q2[j];
        }
        sums[first / KT_K_BLOCK] = sum;
    }
    return fine;
}
