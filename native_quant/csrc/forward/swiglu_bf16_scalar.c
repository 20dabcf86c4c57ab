/* silu(gate) * up, rounded to BF16, and what is missing then. */
#include "outputs_scalar.h"

void kt_swiglu_bf16_scalar(int64_t m, const float *gate, const float *up, uint16_t *out, uint16_t *rest,
                           int64_t out_pitch) {
    for (int64_t t = 0; t < m; t++)
        for (int64_t r = 0; r < KT_PANEL_ROWS; r++) {
            float h = kt_silu(gate[t * KT_PANEL_ROWS + r]) * up[t * KT_PANEL_ROWS + r];
            uint16_t *rounded = &out[t * out_pitch + r];
            *rounded = kt_to_bf16(h);
            if (rest) rest[t * out_pitch + r] = kt_to_bf16(h - kt_from_bf16(*rounded));
        }
}
