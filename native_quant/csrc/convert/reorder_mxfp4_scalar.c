/* Codes of 32 columns of a row are two words of 64 bits here. */
#include <string.h>

#include "ggml_blocks.h"
#include "kernels.h"

/* The lower nibbles of 8 bytes, side by side. */
static uint64_t narrow_nibbles(uint64_t bytes) {
    bytes &= 0x0f0f0f0f0f0f0f0f;
    bytes = (bytes | bytes >> 4) & 0x00ff00ff00ff00ff;
    bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffff;
    return (bytes | bytes >> 16) & 0xffffffff;
}

/* Nibbles 0, 2, 4 and 6 of each word of 32 bits to its lower half, the others to its upper half. */
static uint64_t pair_nibbles(uint64_t codes) {
    uint64_t even = codes & 0x0f0f0f0f0f0f0f0f, odd = codes >> 4 & 0x0f0f0f0f0f0f0f0f;
    even = (even | even >> 4) & 0x00ff00ff00ff00ff;
    odd = (odd | odd >> 4) & 0x00ff00ff00ff00ff;
    even = (even | even >> 8) & 0x0000ffff0000ffff;
    odd = (odd | odd >> 8) & 0x0000ffff0000ffff;
    return even | odd << 16;
}

void kt_reorder_mxfp4_scalar(int kind, const uint8_t *rows, int64_t row_stride, int64_t blocks, uint8_t *codes) {
    for (int64_t b = 0; b < blocks; b++, codes += 2 * KT_MXFP4_HALF_BYTES)
        for (int64_t r = 0; r < KT_HALF_ROWS; r++) {
            uint64_t stored[2];
            if (kind == KTQ_GGML_MXFP4) {
                memcpy(stored, ((const kt_ggml_mxfp4 *)(rows + r * row_stride))[b].q, sizeof stored);
                uint64_t low = narrow_nibbles(stored[0]) | narrow_nibbles(stored[1]) << 32;
                stored[1] = narrow_nibbles(stored[0] >> 4) | narrow_nibbles(stored[1] >> 4) << 32;
                stored[0] = low;
            } else {
                memcpy(stored, rows + r * row_stride + b * (int64_t)sizeof stored, sizeof stored);
            }
            for (int v = 0; v < 4; v++) {
                uint32_t word = (uint32_t)(pair_nibbles(stored[v / 2]) >> v % 2 * 32);
                memcpy(codes + 64 * v + 4 * r, &word, sizeof word);
            }
        }
}
