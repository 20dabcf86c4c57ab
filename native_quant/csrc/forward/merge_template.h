/* The sum over NUMA slices, as BF16: two vectors of columns at a time. */
#include "outputs_template.h"

TARGET static inline ints bf16_of_sum(int64_t terms, const float *const *rows, int64_t c) {
    floats sum = loadu_ps(rows[0] + c);
    for (int64_t i = 1; i < terms; i++) sum = add_ps(sum, loadu_ps(rows[i] + c));
    return round_to_bf16(sum);
}

TARGET void KERNEL_OF(merge)(int64_t terms, const float *const *rows, int64_t columns, uint16_t *out) {
    for (int64_t c = 0; c < columns; c += 2 * LANES)
        storeu_si(out + c, kt_upper_halves(bf16_of_sum(terms, rows, c), bf16_of_sum(terms, rows, c + LANES)));
}
