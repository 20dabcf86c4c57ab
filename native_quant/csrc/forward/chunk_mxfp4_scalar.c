/* MXFP4 to BF16, exactly. */
#include "bf16.h"
#include "convert/e2m1.h"
#include "kernels.h"

int kt_chunk_mxfp4_scalar(const uint8_t *codes, const uint8_t *scales, int64_t columns, uint16_t *chunk,
                          float *scale) {
    int has_zero = 0;
    /* Each 32 words of 4 codes become four times 32 BF16, of the lowest codes first. */
    for (int64_t i = 0; i < columns * KT_PANEL_ROWS; i++) {
        uint16_t word = kt_load16(codes + (i / 128 * 32 + i % 32) * 2);
        chunk[i] = (uint16_t)(kt_bits(kt_e2m1[word >> i / 32 % 4 * 4 & 15]) >> 16);
    }
    for (int64_t i = 0; i < columns; i++) {
        scale[i] = kt_float((uint32_t)scales[i] << 23);
        has_zero |= !scales[i];
    }
    return has_zero;
}
