/* Codes of 4, 5, 6 and 8 bits, one by one (ktq.h). */
#ifndef KT_CODE_AT_H
#define KT_CODE_AT_H

#include "bf16.h"
#include "kernels.h"

/* That of item i of a chunk, which goes half by half, of 16 lines of 32 items. Of 4 bits: without a sign. */
static inline int kt_code_at(int bits, const uint8_t *codes, int64_t i) {
    if (bits == 8) return (int8_t)codes[i];
    if (bits == 4) return kt_load16(codes + (i / 128 * 32 + i % 32) * 2) >> i / 32 % 4 * 4 & 15;
    int line = (int)(i / 32 % 16), at = (int)(i % 32), v = line / 4, g = line % 4, more = bits - 4;
    const uint8_t *half = codes + i / 512 * (64 * bits);
    int low = kt_load16(half + v * 64 + 2 * at) >> g * 4 & 15;
    int high = half[256 + v * more / 4 * 64 + 2 * at + g / 2] >> ((4 + 2 * more * v) % 8 + more * (g % 2));
    return (low | (high & ((1 << more) - 1)) << 4) - (bits == 6 ? 32 : 0);
}

/* Which of the scales [columns / 16][32 rows] item i has: 8 pairs of columns of 16 rows share theirs. */
static inline int64_t kt_scale_at(int64_t i) {
    int64_t half = i / 512, row = half % 2 * KT_HALF_ROWS + i / 2 % KT_HALF_ROWS;
    return (half / 2 * 2 + i / 256 % 2) * KT_PANEL_ROWS + row;
}

#endif
