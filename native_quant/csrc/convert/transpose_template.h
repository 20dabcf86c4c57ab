/* As many columns as make a vector of a row, of as many rows as make one or, of items of 1 and 2 bytes, two of a
 * column. Such items are first put together to 32-bit words of 4 and 2 columns; then everything is a transpose of
 * LANES x LANES words. The scalar kernel takes other numbers of rows and the remaining columns. */
#include "kernels.h"

/* words[i] word j -> at out + row_order(j) * pitch, word i. */
#define STORE_TRANSPOSED(words, row_order, out, pitch)                                                                 \
    do {                                                                                                               \
        ints transposed[LANES];                                                                                        \
        transpose_words(words, transposed);                                                                            \
        for (int j = 0; j < LANES; j++) storeu_si((out) + (row_order) * (pitch), transposed[j]);                       \
    } while (0)

/* LANES columns of as many items of 4 bytes. */
TARGET static void transpose_4(const uint8_t *in, int64_t stride, uint8_t *out, int64_t pitch) {
    ints words[LANES];
    for (int c = 0; c < LANES; c++) words[c] = loadu_si(in + c * stride);
    STORE_TRANSPOSED(words, j, out, pitch);
}

/* 2 * LANES columns of as many items of 2 bytes. A word: columns 2i and 2i + 1 of a row. Within each 128 bits, 4 rows
   are unpacked to the lower word, the next 4 to the upper. */
TARGET static void transpose_2(const uint8_t *in, int64_t stride, uint8_t *out, int64_t pitch) {
    ints low[LANES], high[LANES];
    for (int i = 0; i < LANES; i++) {
        ints a = loadu_si(in + 2 * i * stride), b = loadu_si(in + (2 * i + 1) * stride);
        low[i] = unpacklo_epi16(a, b);
        high[i] = unpackhi_epi16(a, b);
    }
    STORE_TRANSPOSED(low, j / 4 * 8 + j % 4, out, pitch);
    STORE_TRANSPOSED(high, j / 4 * 8 + j % 4, out + 4 * pitch, pitch);
}

/* LANES columns of as many items of 2 bytes, each in a word of its own meanwhile. */
TARGET static void transpose_few_2(const uint8_t *in, int64_t stride, uint8_t *out, int64_t pitch) {
    ints words[LANES], transposed[LANES];
    for (int c = 0; c < LANES; c++) words[c] = load_epu16_epi32(in + c * stride);
    transpose_words(words, transposed);
    for (int r = 0; r < LANES; r++) store_epi32_epi16(out + r * pitch, transposed[r]);
}

/* 4 * LANES columns of 2 * LANES items of 1 byte. A word: columns 4i .. 4i + 3 of a row. */
TARGET static void transpose_1(const uint8_t *in, int64_t stride, uint8_t *out, int64_t pitch) {
    enum { QUARTERS = LANES / 8 }; /* 128 bits of a half vector: 16 rows each */
    ints low[LANES], high[LANES];
    for (int i = 0; i < LANES; i++) {
        const uint8_t *column = in + 4 * i * stride;
        half_ints a = half_loadu(column), b = half_loadu(column + stride);
        half_ints c = half_loadu(column + 2 * stride), d = half_loadu(column + 3 * stride);
        half_ints ab = half_unpacklo_epi8(a, b), cd = half_unpacklo_epi8(c, d); /* rows 0-7 of each 16 */
        half_ints AB = half_unpackhi_epi8(a, b), CD = half_unpackhi_epi8(c, d); /* rows 8-15 */
        low[i] = joined(half_unpacklo_epi16(ab, cd), half_unpackhi_epi16(ab, cd));
        high[i] = joined(half_unpacklo_epi16(AB, CD), half_unpackhi_epi16(AB, CD));
    }
    STORE_TRANSPOSED(low, j / 4 % QUARTERS * 16 + j / 4 / QUARTERS * 4 + j % 4, out, pitch);
    STORE_TRANSPOSED(high, j / 4 % QUARTERS * 16 + j / 4 / QUARTERS * 4 + j % 4, out + 8 * pitch, pitch);
}

/* `turn` for `at_once` rows and `step` columns at a time, and what is left of the columns. */
TARGET static __attribute__((noinline)) void
in_steps(int item_bytes, int64_t at_once, int64_t step, void turn(const uint8_t *, int64_t, uint8_t *, int64_t),
         const uint8_t *in, int64_t column_stride, int64_t rows, int64_t columns, uint8_t *out, int64_t row_pitch) {
    for (; rows % at_once == 0 && step <= columns; columns -= step) {
        /* The columns are far apart, each on its own page: prefetch those of the next step. */
        if (2 * step <= columns)
            for (int64_t c = step; c < 2 * step; c++) fetch(in + c * column_stride);
        for (int64_t r = 0; r < rows; r += at_once)
            turn(in + r * item_bytes, column_stride, out + r * row_pitch, row_pitch);
        in += step * column_stride;
        out += step * item_bytes;
    }
    if (columns) kt_transpose_scalar(item_bytes, in, column_stride, rows, columns, out, row_pitch);
}

TARGET void KERNEL_OF(transpose)(int item_bytes, const uint8_t *in, int64_t column_stride, int64_t rows,
                                 int64_t columns, uint8_t *out, int64_t row_pitch) {
    if (item_bytes == 4 && rows == LANES && columns == LANES) /* a block of a chunk: a tenth of its time is the loops */
        transpose_4(in, column_stride, out, row_pitch);
    else if (item_bytes == 4)
        in_steps(4, LANES, LANES, transpose_4, in, column_stride, rows, columns, out, row_pitch);
    else if (item_bytes == 1)
        in_steps(1, 2 * LANES, 4 * LANES, transpose_1, in, column_stride, rows, columns, out, row_pitch);
    else if (rows % (2 * LANES))
        in_steps(2, LANES, LANES, transpose_few_2, in, column_stride, rows, columns, out, row_pitch);
    else
        in_steps(2, 2 * LANES, 2 * LANES, transpose_2, in, column_stride, rows, columns, out, row_pitch);
}
