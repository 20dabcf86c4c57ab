/* Scales to float32, exactly. */
#include "bf16.h"
#include "kernels.h"

void kt_widen_scales_scalar(int kind, const uint8_t *scales, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i++) {
        out[i] = kind == KT_BF16_SCALES ? kt_from_bf16(kt_load16(scales + 2 * i)) : kt_float((uint32_t)scales[i] << 23);
        if (kind == KT_HALF_E8M0_SCALES) out[i] *= 0.5f;
    }
}
