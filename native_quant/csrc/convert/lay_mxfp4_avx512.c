/* AVX-512 F and BW: four blocks of a row are a register, whose words of 32 bits are 8 columns each; 16 rows of them are
 * transposed. Fewer blocks are left to the scalar kernel. */
#include "ggml_blocks.h"
#include "words_avx512.h"

enum { BLOCKS = 4 };

/* Neighbouring nibbles, which are bytes, to one byte of a word. */
KT_TARGET_AVX512 static inline __m512i joined(__m512i nibbles) {
    return _mm512_maddubs_epi16(_mm512_and_si512(nibbles, _mm512_set1_epi8(15)), _mm512_set1_epi16(0x1001));
}

/* Even columns are in lower nibbles, odd ones in upper nibbles. */
KT_TARGET_AVX512 static inline __m512i load_codes(const uint8_t *blocks) {
    const __m128i order = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    __m512i x = _mm512_loadu_si512(blocks);
    x = _mm512_packus_epi16(joined(x), joined(_mm512_srli_epi16(x, 4)));
    return _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(order));
}

/* The first 16 columns of a block are in lower nibbles, the others in upper nibbles. */
KT_TARGET_AVX512 static inline __m512i load_ggml(const kt_ggml_mxfp4 *blocks) {
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    __m512i x = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)blocks[0].q));
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)blocks[1].q), 1);
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)blocks[2].q), 2);
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)blocks[3].q), 3);
    x = _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(order));
    return _mm512_packus_epi16(joined(x), joined(_mm512_srli_epi16(x, 4)));
}

KT_TARGET_AVX512 void kt_lay_mxfp4_avx512(int kind, const uint8_t *rows, int64_t row_stride, int64_t blocks,
                                          uint8_t *codes) {
    int64_t block_bytes = kind == KTQ_GGML_MXFP4 ? (int64_t)sizeof(kt_ggml_mxfp4) : KT_GROUP_COLUMNS / 2;
    for (; blocks >= BLOCKS; blocks -= BLOCKS, rows += BLOCKS * block_bytes) {
        __m512i in[KT_HALF_ROWS], out[KT_HALF_ROWS];
        for (int r = 0; r < KT_HALF_ROWS; r++) {
            const uint8_t *row = rows + r * row_stride;
            in[r] = kind == KTQ_GGML_MXFP4 ? load_ggml((const kt_ggml_mxfp4 *)row) : load_codes(row);
        }
        kt_transpose_words(in, out);
        for (int b = 0; b < BLOCKS; b++, codes += 2 * KT_MXFP4_HALF_BYTES)
            for (int v = 0; v < 4; v++) _mm512_storeu_si512(codes + 64 * v, out[4 * b + v]);
    }
    if (blocks) kt_lay_mxfp4_scalar(kind, rows, row_stride, blocks, codes);
}
