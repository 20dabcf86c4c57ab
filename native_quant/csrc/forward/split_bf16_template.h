/* Float32 rounded to BF16, and the rounding error, two vectors at a time. */
#include "bf16_template.h"

TARGET void KERNEL_OF(split_bf16)(int64_t m, const float *x, uint16_t *out, uint16_t *errors, int64_t out_pitch) {
    for (int64_t t = 0; t < m; t++, x += KT_PANEL_ROWS)
        for (int64_t r = 0; r < KT_PANEL_ROWS; r += 2 * LANES) {
            floats h[2];
            ints rounded[2], missing[2];
            for (int i = 0; i < 2; i++) {
                h[i] = loadu_ps(x + r + i * LANES);
                rounded[i] = round_to_bf16(h[i]);
            }
            storeu_si(out + t * out_pitch + r, kt_upper_halves(rounded[0], rounded[1]));
            if (!errors) continue;
            for (int i = 0; i < 2; i++) missing[i] = round_to_bf16(sub_ps(h[i], upper_half(rounded[i])));
            storeu_si(errors + t * out_pitch + r, kt_upper_halves(missing[0], missing[1]));
        }
}
