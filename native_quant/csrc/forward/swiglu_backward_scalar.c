/* The gradients of gate and up from that of silu(gate) * up. */
#include "outputs_scalar.h"

void kt_swiglu_backward_scalar(int64_t m, const float *gradient, const uint16_t *gate, const uint16_t *up,
                               uint16_t *of_gate, uint16_t *of_up, int64_t pitch) {
    for (int64_t t = 0; t < m; t++)
        for (int64_t i = t * pitch, r = 0; r < KT_PANEL_ROWS; i++, r++) {
            float x = kt_from_bf16(gate[i]), minus = 0.0f - x, d = gradient[t * KT_PANEL_ROWS + r];
            float sigmoid = 1.0f / (1.0f + kt_exp(minus > 88.0f ? 88.0f : minus));
            float slope = sigmoid * fmaf(x, 1.0f - sigmoid, 1.0f);
            of_gate[i] = kt_to_bf16(d * slope * kt_from_bf16(up[i]));
            of_up[i] = kt_to_bf16(d * (x * sigmoid));
        }
}
