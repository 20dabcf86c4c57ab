/* The sum over NUMA slices, as BF16. */
#include "bf16.h"
#include "kernels.h"

void kt_merge_scalar(int64_t terms, const float *const *rows, int64_t columns, uint16_t *out) {
    for (int64_t c = 0; c < columns; c++) {
        float sum = rows[0][c];
        for (int64_t i = 1; i < terms; i++) sum += rows[i][c];
        out[c] = kt_to_bf16(sum);
    }
}
