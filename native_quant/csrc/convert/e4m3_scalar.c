/* BF16 to FP8 E4M3, one after the other. */
#include "e4m3.h"

void kt_e4m3_scalar(const uint16_t *values, int64_t count, float scale, uint8_t *codes) {
    for (int64_t i = 0; i < count; i++) {
        float magnitude = kt_from_bf16(values[i] & KT_BF16_MAGNITUDE);
        codes[i] = (uint8_t)(kt_e4m3_magnitude(magnitude / scale) | (values[i] >> 8 & 0x80));
    }
}
