/* AVX2: 16 or 32 rows and as many columns as make 32 bytes of a row, 8 or 16 rows at a time. Items of 1 and 2 bytes are
 * first put together to 32-bit words of 4 and 2 columns; then everything is a transpose of 8 x 8 words. Other numbers
 * of rows, and what is left of the columns, are left to the scalar kernel. */
#include <immintrin.h>

#include "kernels.h"

/* words[i] word j -> at out + rows[j] * pitch, word i, for the 8 rows that `rows` names. */
KT_TARGET_AVX2 static inline void store_transposed(const __m256i *words, const uint8_t *rows, uint8_t *out,
                                                   int64_t pitch) {
    __m256i turned[2][4]; /* [g][q]: in lane l, word 4l + q of words[4g..4g+3] */
    for (int g = 0; g < 2; g++) {
        const __m256i *w = words + 4 * g;
        __m256i low01 = _mm256_unpacklo_epi32(w[0], w[1]), high01 = _mm256_unpackhi_epi32(w[0], w[1]);
        __m256i low23 = _mm256_unpacklo_epi32(w[2], w[3]), high23 = _mm256_unpackhi_epi32(w[2], w[3]);
        turned[g][0] = _mm256_unpacklo_epi64(low01, low23);
        turned[g][1] = _mm256_unpackhi_epi64(low01, low23);
        turned[g][2] = _mm256_unpacklo_epi64(high01, high23);
        turned[g][3] = _mm256_unpackhi_epi64(high01, high23);
    }
    for (int q = 0; q < 4; q++) {
        __m256i low = _mm256_permute2x128_si256(turned[0][q], turned[1][q], 0x20);
        __m256i high = _mm256_permute2x128_si256(turned[0][q], turned[1][q], 0x31);
        _mm256_storeu_si256((__m256i *)(out + rows[q] * pitch), low);
        _mm256_storeu_si256((__m256i *)(out + rows[4 + q] * pitch), high);
    }
}

/* 8 columns of 8 float32. */
KT_TARGET_AVX2 static void transpose_4(const uint8_t *in, int64_t stride, uint8_t *out, int64_t pitch) {
    static const uint8_t rows[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    __m256i words[8];
    for (int c = 0; c < 8; c++) words[c] = _mm256_loadu_si256((const __m256i *)(in + c * stride));
    store_transposed(words, rows, out, pitch);
}

/* 16 columns of 16 items of 2 bytes. A word: columns 2i and 2i + 1 of a row. */
KT_TARGET_AVX2 static void transpose_2(const uint8_t *in, int64_t stride, uint8_t *out, int64_t pitch) {
    static const uint8_t low_rows[8] = {0, 1, 2, 3, 8, 9, 10, 11};
    __m256i low[8], high[8];
    for (int i = 0; i < 8; i++) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(in + 2 * i * stride));
        __m256i b = _mm256_loadu_si256((const __m256i *)(in + (2 * i + 1) * stride));
        low[i] = _mm256_unpacklo_epi16(a, b);
        high[i] = _mm256_unpackhi_epi16(a, b);
    }
    store_transposed(low, low_rows, out, pitch);
    store_transposed(high, low_rows, out + 4 * pitch, pitch);
}

/* 32 columns of 16 items of 1 byte. A word: columns 4i .. 4i + 3 of a row. */
KT_TARGET_AVX2 static void transpose_1(const uint8_t *in, int64_t stride, uint8_t *out, int64_t pitch) {
    static const uint8_t low_rows[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    __m256i low[8], high[8];
    for (int i = 0; i < 8; i++) {
        const uint8_t *column = in + 4 * i * stride;
        __m128i a = _mm_loadu_si128((const __m128i *)column), b = _mm_loadu_si128((const __m128i *)(column + stride));
        __m128i c = _mm_loadu_si128((const __m128i *)(column + 2 * stride)),
                d = _mm_loadu_si128((const __m128i *)(column + 3 * stride));
        __m128i ab = _mm_unpacklo_epi8(a, b), cd = _mm_unpacklo_epi8(c, d); /* rows 0-7 */
        __m128i AB = _mm_unpackhi_epi8(a, b), CD = _mm_unpackhi_epi8(c, d); /* rows 8-15 */
        low[i] = _mm256_set_m128i(_mm_unpackhi_epi16(ab, cd), _mm_unpacklo_epi16(ab, cd));
        high[i] = _mm256_set_m128i(_mm_unpackhi_epi16(AB, CD), _mm_unpacklo_epi16(AB, CD));
    }
    store_transposed(low, low_rows, out, pitch);
    store_transposed(high, low_rows, out + 8 * pitch, pitch);
}

KT_TARGET_AVX2 void kt_transpose_avx2(int item_bytes, const uint8_t *in, int64_t column_stride, int64_t rows,
                                      int64_t columns, uint8_t *out, int64_t row_pitch) {
    int64_t step = 32 / item_bytes, done = 0;
    int64_t rows_at_once = item_bytes == 4 ? 8 : 16;
    for (; (rows == KT_STRIP_ROWS || rows == KT_HALF_ROWS) && done + step <= columns; done += step) {
        /* The columns are far apart, each on its own page: prefetch those of the next step. */
        if (done + 2 * step <= columns)
            for (int64_t c = step; c < 2 * step; c++)
                _mm_prefetch((const char *)in + (done + c) * column_stride, _MM_HINT_T0);
        for (int64_t r = 0; r < rows; r += rows_at_once) {
            const uint8_t *from = in + done * column_stride + r * item_bytes;
            uint8_t *to = out + done * item_bytes + r * row_pitch;
            if (item_bytes == 4)
                transpose_4(from, column_stride, to, row_pitch);
            else if (item_bytes == 2)
                transpose_2(from, column_stride, to, row_pitch);
            else
                transpose_1(from, column_stride, to, row_pitch);
        }
    }
    if (done < columns)
        kt_transpose_scalar(item_bytes, in + done * column_stride, column_stride, rows, columns - done,
                            out + done * item_bytes, row_pitch);
}
