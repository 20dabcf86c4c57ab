/* FP16 to float32, times bytes. */
#include "bf16.h"
#include "kernels.h"

void kt_half_scales_scalar(const uint8_t *halves, const uint8_t *factors, int64_t groups, float *out) {
    for (int64_t i = 0; i < groups * KT_PANEL_ROWS; i++) {
        float half = kt_from_fp16(kt_load16(halves + 2 * (factors ? i % KT_PANEL_ROWS : i)));
        out[i] = factors ? half * (float)factors[i] : half;
    }
}
