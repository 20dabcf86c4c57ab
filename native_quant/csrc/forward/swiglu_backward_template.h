/* The gradients of gate and up from that of silu(gate) * up, two vectors of rows at a time. */
#include "outputs_template.h"

TARGET void KERNEL_OF(swiglu_backward)(int64_t m, const float *gradient, const uint16_t *gate, const uint16_t *up,
                                       uint16_t *of_gate, uint16_t *of_up, int64_t pitch) {
    const floats one = set1_ps(1.0f);
    for (int64_t t = 0; t < m; t++, gradient += KT_PANEL_ROWS)
        for (int64_t r = 0; r < KT_PANEL_ROWS; r += 2 * LANES) {
            ints g[2], u[2];
            int64_t at = t * pitch + r;
            for (int i = 0; i < 2; i++) {
                floats x = castsi_ps(slli_epi32(load_epu16_epi32(gate + at + i * LANES), 16));
                floats y = castsi_ps(slli_epi32(load_epu16_epi32(up + at + i * LANES), 16));
                floats d = loadu_ps(gradient + r + i * LANES), minus = min_ps(set1_ps(88.0f), sub_ps(setzero_ps(), x));
                floats sigmoid = div_ps(one, add_ps(one, kt_exp(minus)));
                floats slope = mul_ps(sigmoid, fmadd_ps(x, sub_ps(one, sigmoid), one));
                g[i] = bf16_above(mul_ps(mul_ps(d, slope), y));
                u[i] = bf16_above(mul_ps(d, mul_ps(x, sigmoid)));
            }
            storeu_si(of_gate + at, kt_upper_halves(g[0], g[1]));
            storeu_si(of_up + at, kt_upper_halves(u[0], u[1]));
        }
}
