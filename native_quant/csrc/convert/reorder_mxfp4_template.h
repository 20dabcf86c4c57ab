/* Blocks of a row that fill a vector, whose words of 32 bits are 8 columns each; LANES rows of them are transposed.
 * Fewer blocks are left to the scalar kernel. */
#include "ggml_blocks.h"

/* Neighbouring nibbles, which are bytes, to one byte of a word. */
TARGET static inline ints join_nibbles(ints nibbles) {
    return maddubs_epi16(and_si(nibbles, set1_epi8(15)), set1_epi16(0x1001));
}

/* Even columns are in lower nibbles, odd ones in upper nibbles. */
TARGET static inline ints load_fp4(const uint8_t *blocks) {
    static const uint8_t order[16] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
    ints x = loadu_si(blocks);
    return shuffle_epi8(packus_epi16(join_nibbles(x), join_nibbles(srli_epi16(x, 4))), load_repeated(order));
}

/* The first 16 columns of a block are in lower nibbles, the others in upper nibbles. */
TARGET static inline ints load_ggml(const kt_ggml_mxfp4 *blocks) {
    static const uint8_t order[16] = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
    ints x = shuffle_epi8(load_strided(blocks->q, sizeof *blocks), load_repeated(order));
    return packus_epi16(join_nibbles(x), join_nibbles(srli_epi16(x, 4)));
}

TARGET void KERNEL_OF(reorder_mxfp4)(int kind, const uint8_t *rows, int64_t row_stride, int64_t blocks,
                                     uint8_t *codes) {
    enum { BLOCKS = VECTOR_BYTES / 16 };
    int64_t block_bytes = kind == KTQ_GGML_MXFP4 ? (int64_t)sizeof(kt_ggml_mxfp4) : KT_GROUP_COLUMNS / 2;
    for (; blocks >= BLOCKS; blocks -= BLOCKS, rows += BLOCKS * block_bytes, codes += BLOCKS * 2 * KT_MXFP4_HALF_BYTES)
        for (int first = 0; first < KT_HALF_ROWS; first += LANES) {
            ints in[LANES], out[LANES];
            for (int r = 0; r < LANES; r++) {
                const uint8_t *row = rows + (first + r) * row_stride;
                in[r] = kind == KTQ_GGML_MXFP4 ? load_ggml((const kt_ggml_mxfp4 *)row) : load_fp4(row);
            }
            transpose_words(in, out);
            for (int i = 0; i < LANES; i++)
                storeu_si(codes + i / 4 * 2 * KT_MXFP4_HALF_BYTES + i % 4 * 64 + 4 * first, out[i]);
        }
    if (blocks) kt_reorder_mxfp4_scalar(kind, rows, row_stride, blocks, codes);
}
