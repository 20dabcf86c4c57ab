/* silu(gate) * up, rounded to BF16, and what is missing then, two vectors of rows at a time. */
#include "outputs_template.h"

TARGET void KERNEL_OF(swiglu_bf16)(int64_t m, const float *gate, const float *up, uint16_t *out, uint16_t *errors,
                                   int64_t out_pitch) {
    for (int64_t t = 0; t < m; t++, gate += KT_PANEL_ROWS, up += KT_PANEL_ROWS)
        for (int64_t r = 0; r < KT_PANEL_ROWS; r += 2 * LANES) {
            floats h[2];
            ints rounded[2], missing[2];
            for (int i = 0; i < 2; i++) {
                h[i] = mul_ps(kt_silu(loadu_ps(gate + r + i * LANES)), loadu_ps(up + r + i * LANES));
                rounded[i] = round_to_bf16(h[i]);
            }
            storeu_si(out + t * out_pitch + r, kt_upper_halves(rounded[0], rounded[1]));
            if (!errors) continue;
            for (int i = 0; i < 2; i++) missing[i] = round_to_bf16(sub_ps(h[i], upper_half(rounded[i])));
            storeu_si(errors + t * out_pitch + r, kt_upper_halves(missing[0], missing[1]));
        }
}
