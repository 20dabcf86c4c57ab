/* BF16 to FP8 E4M3, one after the other. */
#include "e4m3.h"

void kt_e4m3_scalar(const uint8_t *values, int64_t count, float scale, uint8_t *codes) {
    for (int64_t i = 0; i < count; i++) {
        uint16_t x = kt_load16(values + 2 * i);
        codes[i] = (uint8_t)(kt_e4m3_magnitude(kt_from_bf16(x & KT_BF16_MAGNITUDE) / scale) | (x >> 8 & 0x80));
    }
}
