/* AVX2: two blocks of a row are a register, whose words of 32 bits are 8 columns each; 8 rows of them are transposed. A
 * single block is left to the scalar kernel. */
#include <string.h>

#include "ggml_blocks.h"
#include "pack_avx2.h"

enum { BLOCKS = 2, ROWS = 8 };

/* Neighbouring nibbles, which are bytes, to one byte of a word. */
KT_TARGET_AVX2 static inline __m256i joined(__m256i nibbles) {
    return _mm256_maddubs_epi16(_mm256_and_si256(nibbles, _mm256_set1_epi8(15)), _mm256_set1_epi16(0x1001));
}

/* Even columns are in lower nibbles, odd ones in upper nibbles. */
KT_TARGET_AVX2 static inline __m256i load_codes(const uint8_t *blocks) {
    const __m128i order = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    __m256i x = _mm256_loadu_si256((const __m256i *)blocks);
    x = _mm256_packus_epi16(joined(x), joined(_mm256_srli_epi16(x, 4)));
    return _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(order));
}

/* The first 16 columns of a block are in lower nibbles, the others in upper nibbles. */
KT_TARGET_AVX2 static inline __m256i load_ggml(const kt_ggml_mxfp4 *blocks) {
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    __m256i x = _mm256_loadu2_m128i((const __m128i *)blocks[1].q, (const __m128i *)blocks[0].q);
    x = _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(order));
    return _mm256_packus_epi16(joined(x), joined(_mm256_srli_epi16(x, 4)));
}

KT_TARGET_AVX2 void kt_lay_mxfp4_avx2(int kind, const uint8_t *rows, int64_t row_stride, int64_t blocks,
                                      uint8_t *codes) {
    int64_t block_bytes = kind == KTQ_GGML_MXFP4 ? (int64_t)sizeof(kt_ggml_mxfp4) : KT_GROUP_COLUMNS / 2;
    for (; blocks >= BLOCKS; blocks -= BLOCKS, rows += BLOCKS * block_bytes) {
        uint8_t halves[BLOCKS * KT_MXFP4_HALF_BYTES];
        for (int first = 0; first < KT_HALF_ROWS; first += ROWS) {
            __m256i in[ROWS];
            for (int r = 0; r < ROWS; r++) {
                const uint8_t *row = rows + (first + r) * row_stride;
                in[r] = kind == KTQ_GGML_MXFP4 ? load_ggml((const kt_ggml_mxfp4 *)row) : load_codes(row);
            }
            kt_store_quads(in, 1, halves + 4 * first);
        }
        for (int b = 0; b < BLOCKS; b++, codes += 2 * KT_MXFP4_HALF_BYTES)
            memcpy(codes, halves + b * KT_MXFP4_HALF_BYTES, KT_MXFP4_HALF_BYTES);
    }
    if (blocks) kt_lay_mxfp4_scalar(kind, rows, row_stride, blocks, codes);
}
