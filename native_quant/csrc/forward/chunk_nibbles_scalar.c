/* Codes of 4 bits to BF16. */
#include "bf16.h"
#include "kernels.h"

void kt_chunk_nibbles_scalar(const uint16_t *values, const uint8_t *codes, int64_t columns, uint16_t *chunk) {
    /* Each 32 words of 4 codes become four times 32 BF16, of the lowest codes first. */
    for (int64_t i = 0; i < columns * KT_PANEL_ROWS; i++) {
        uint16_t word = kt_load16(codes + (i / 128 * 32 + i % 32) * 2);
        chunk[i] = values[word >> i / 32 % 4 * 4 & 15];
    }
}
