/* Codes of 5, 6 and 8 bits to BF16. */
#include "bf16.h"
#include "kernels.h"

/* The code of item i of a chunk: half by half, of 16 lines of 32 items. */
static int code_at(int bits, const uint8_t *codes, int64_t i) {
    int line = (int)(i / 32 % 16), at = (int)(i % 32), more = bits - 4, lines = 16 / more;
    const uint8_t *half = codes + i / 512 * (64 * bits);
    int low = kt_load16(half + line / 4 * 64 + 2 * at) >> line % 4 * 4 & 15;
    int high = kt_load16(half + 256 + line / lines * 64 + 2 * at) >> (4 + more * (line % lines)) % 16;
    return low | (high & ((1 << more) - 1)) << 4;
}

void kt_chunk_integers_scalar(int bits, const uint8_t *codes, const uint16_t *scales, int64_t columns,
                              uint16_t *chunk) {
    for (int64_t i = 0; i < columns * KT_PANEL_ROWS; i++) {
        int code = bits == 8 ? (int8_t)codes[i] : bits == 6 ? code_at(6, codes, i) - 32 : code_at(5, codes, i);
        int64_t half = i / 512, row = half % 2 * KT_HALF_ROWS + i / 2 % KT_HALF_ROWS;
        int64_t group = half / 2 * 2 + i / 256 % 2; /* 8 pairs of columns of 16 rows */
        float scale = scales ? kt_from_bf16(scales[group * KT_PANEL_ROWS + row]) : 1;
        chunk[i] = kt_to_bf16((float)code * scale);
    }
}
