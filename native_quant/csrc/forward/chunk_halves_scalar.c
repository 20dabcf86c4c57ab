/* FP16 as the sum of two BF16. */
#include "bf16.h"
#include "kernels.h"

void kt_chunk_halves_scalar(const uint8_t *codes, int64_t columns, uint16_t *chunk) {
    for (int64_t i = 0; i < columns * KT_PANEL_ROWS; i++) {
        float x = kt_from_fp16(kt_load16(codes + 2 * i)), upper = kt_float(kt_bits(x) & 0xffff0000);
        chunk[i] = (uint16_t)(kt_bits(upper) >> 16);
        chunk[columns * KT_PANEL_ROWS + i] = (uint16_t)(kt_bits(x - upper) >> 16);
    }
}
