/* The definition in C: section 2c of numerics.md, a value at a time. */
#include "bf16.h"
#include "kernels.h"

/* x / step to the nearest integer, halves away from 0. */
static int code(const uint8_t *value, float step) {
    if (step == 0.0f) return 0;
    float q = kt_from_bf16(kt_load16(value)) / step;
    int whole = (int)q;
    float rest = q - (float)whole;
    return whole + (rest >= 0.5f) - (rest <= -0.5f);
}

void kt_plain_row_scalar(int bits, const uint8_t *row, int64_t k, float step, uint8_t *codes) {
    for (int64_t c = 0; c < k; c += KT_PLAIN_BYTES * 8 / bits, codes += KT_PLAIN_ROWS * KT_PLAIN_BYTES)
        for (int64_t i = 0; i < KT_PLAIN_BYTES; i++) {
            unsigned byte = (unsigned)code(row + 2 * (c + i), step);
            if (bits == 4) byte = byte << 4 | ((unsigned)code(row + 2 * (c + KT_PLAIN_BYTES + i), step) & 15);
            codes[i] = (uint8_t)byte;
        }
}
