/* AVX-512 F, BW and VL: 32 rows and as many columns as make 64 bytes of a row. Items of 1 and 2 bytes are first put
 * together to 32-bit words of 4 and 2 columns; then everything is a transpose of 16 x 16 words. 16 rows of 2 or 4 bytes
 * are turned 16 columns at a time. Other numbers of rows, and what is left of the columns, are left to the scalar
 * kernel. */
#include <immintrin.h>

#include "words_avx512.h"

/* words[i] word j -> at out + rows[j] * pitch, word i, for the 16 rows that `rows` names. */
KT_TARGET_AVX512 static inline void store_transposed(const __m512i *words, const uint8_t *rows, uint8_t *out,
                                                     int64_t pitch) {
    __m512i turned[16];
    kt_transpose_words(words, turned);
    for (int j = 0; j < 16; j++) _mm512_storeu_si512(out + rows[j] * pitch, turned[j]);
}

/* 16 columns of 32 float32. */
KT_TARGET_AVX512 static void transpose_4(const uint8_t *in, int64_t stride, uint8_t *out, int64_t pitch) {
    static const uint8_t rows[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int half = 0; half < 2; half++) {
        __m512i words[16];
        for (int c = 0; c < 16; c++) words[c] = _mm512_loadu_si512(in + c * stride + 64 * half);
        store_transposed(words, rows, out + 16 * half * pitch, pitch);
    }
}

/* 32 columns of 32 items of 2 bytes. A word: columns 2i and 2i + 1 of a row. */
KT_TARGET_AVX512 static void transpose_2(const uint8_t *in, int64_t stride, uint8_t *out, int64_t pitch) {
    static const uint8_t low_rows[16] = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
    __m512i low[16], high[16];
    for (int i = 0; i < 16; i++) {
        __m512i a = _mm512_loadu_si512(in + 2 * i * stride), b = _mm512_loadu_si512(in + (2 * i + 1) * stride);
        low[i] = _mm512_unpacklo_epi16(a, b);
        high[i] = _mm512_unpackhi_epi16(a, b);
    }
    store_transposed(low, low_rows, out, pitch);
    store_transposed(high, low_rows, out + 4 * pitch, pitch);
}

/* 64 columns of 32 items of 1 byte. A word: columns 4i .. 4i + 3 of a row. */
KT_TARGET_AVX512 static void transpose_1(const uint8_t *in, int64_t stride, uint8_t *out, int64_t pitch) {
    static const uint8_t low_rows[16] = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
    __m512i low[16], high[16];
    for (int i = 0; i < 16; i++) {
        const uint8_t *column = in + 4 * i * stride;
        __m256i a = _mm256_loadu_si256((const __m256i *)column),
                b = _mm256_loadu_si256((const __m256i *)(column + stride));
        __m256i c = _mm256_loadu_si256((const __m256i *)(column + 2 * stride)),
                d = _mm256_loadu_si256((const __m256i *)(column + 3 * stride));
        __m256i ab = _mm256_unpacklo_epi8(a, b), cd = _mm256_unpacklo_epi8(c, d); /* rows 0-7, 16-23 */
        __m256i AB = _mm256_unpackhi_epi8(a, b), CD = _mm256_unpackhi_epi8(c, d); /* rows 8-15, 24-31 */
        low[i] =
            _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_unpacklo_epi16(ab, cd)), _mm256_unpackhi_epi16(ab, cd), 1);
        high[i] =
            _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_unpacklo_epi16(AB, CD)), _mm256_unpackhi_epi16(AB, CD), 1);
    }
    store_transposed(low, low_rows, out, pitch);
    store_transposed(high, low_rows, out + 8 * pitch, pitch);
}

/* 16 columns of 16 items of 4 bytes. */
KT_TARGET_AVX512 static void transpose_half_4(const uint8_t *in, int64_t stride, uint8_t *out, int64_t pitch) {
    __m512i words[16], turned[16];
    for (int c = 0; c < 16; c++) words[c] = _mm512_loadu_si512(in + c * stride);
    kt_transpose_words(words, turned);
    for (int r = 0; r < 16; r++) _mm512_storeu_si512(out + r * pitch, turned[r]);
}

/* 16 columns of 16 items of 2 bytes, each in a word of its own meanwhile. */
KT_TARGET_AVX512 static void transpose_half_2(const uint8_t *in, int64_t stride, uint8_t *out, int64_t pitch) {
    __m512i words[16], turned[16];
    for (int c = 0; c < 16; c++)
        words[c] = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(in + c * stride)));
    kt_transpose_words(words, turned);
    for (int r = 0; r < 16; r++)
        _mm256_storeu_si256((__m256i *)(out + r * pitch), _mm512_cvtepi32_epi16(turned[r]));
}

KT_TARGET_AVX512 void kt_transpose_avx512(int item_bytes, const uint8_t *in, int64_t column_stride, int64_t rows,
                                          int64_t columns, uint8_t *out, int64_t row_pitch) {
    int64_t step = 64 / item_bytes, done = 0;
    for (; rows == KT_STRIP_ROWS && done + step <= columns; done += step) {
        const uint8_t *from = in + done * column_stride;
        uint8_t *to = out + done * item_bytes;
        /* The columns are far apart, each on its own page: prefetch those of the next step. */
        if (done + 2 * step <= columns)
            for (int64_t c = step; c < 2 * step; c++) _mm_prefetch((const char *)from + c * column_stride, _MM_HINT_T0);
        if (item_bytes == 4)
            transpose_4(from, column_stride, to, row_pitch);
        else if (item_bytes == 2)
            transpose_2(from, column_stride, to, row_pitch);
        else
            transpose_1(from, column_stride, to, row_pitch);
    }
    for (; rows == KT_HALF_ROWS && item_bytes > 1 && done + 16 <= columns; done += 16)
        (item_bytes == 4 ? transpose_half_4 : transpose_half_2)(in + done * column_stride, column_stride,
                                                                out + done * item_bytes, row_pitch);
    if (done < columns)
        kt_transpose_scalar(item_bytes, in + done * column_stride, column_stride, rows, columns - done,
                            out + done * item_bytes, row_pitch);
}
