/* silu(gate) * up, rounded to BF16, two vectors of rows at a time. */
#include "outputs_template.h"

TARGET static inline ints product(const float *gate, const float *up) {
    return bf16_above(mul_ps(kt_silu(loadu_ps(gate)), loadu_ps(up)));
}

TARGET void KERNEL_OF(swiglu_bf16)(int64_t m, const float *gate, const float *up, uint16_t *out, int64_t out_pitch) {
    for (int64_t t = 0; t < m; t++, gate += KT_PANEL_ROWS, up += KT_PANEL_ROWS, out += out_pitch)
        for (int64_t r = 0; r < KT_PANEL_ROWS; r += 2 * LANES)
            storeu_si(out + r, kt_upper_halves(product(gate + r, up + r), product(gate + r + LANES, up + r + LANES)));
}
