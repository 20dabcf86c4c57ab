/* Sums of activations that are rounded to 8 bits. */
#include "find_most_template.h"
#include "gemm_int16.h"

TARGET void KERNEL_OF(sum_units)(int64_t columns, const uint16_t *a, float *sums) {
    for (int64_t j = 0; j < columns; j += KT_SUM_COLUMNS, a += KT_SUM_COLUMNS) {
        const float unit = kt_int8_unit(find_most(a));
        const floats reciprocal = set1_ps(kt_int8_reciprocal(unit));
        ints sum = setzero_si();
        for (int i = 0; i < KT_SUM_COLUMNS; i += LANES) {
            const floats x = castsi_ps(slli_epi32(load_epu16_epi32(a + i), 16));
            sum = add_epi32(sum, cvtps_epi32(mul_ps(x, reciprocal)));
        }
        *sums++ = (float)reduce_add_epi32(sum) * unit;
    }
}
