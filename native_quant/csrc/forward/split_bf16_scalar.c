/* Float32 rounded to BF16, and the rounding error. */
#include "bf16.h"
#include "kernels.h"

void kt_split_bf16_scalar(int64_t m, const float *x, uint16_t *out, uint16_t *errors, int64_t out_pitch) {
    for (int64_t t = 0; t < m; t++)
        for (int64_t r = 0; r < KT_PANEL_ROWS; r++) {
            float h = x[t * KT_PANEL_ROWS + r];
            uint16_t *rounded = &out[t * out_pitch + r];
            *rounded = kt_to_bf16(h);
            if (errors) errors[t * out_pitch + r] = kt_to_bf16(h - kt_from_bf16(*rounded));
        }
}
