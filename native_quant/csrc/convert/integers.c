/* Packed integers in any order to BF16 rows: codes that are not stored row after row are first
 * brought into that order, 32 rows at a time. */
#include <string.h>

#include "kernels.h"

/* Codes of 32 rows at a time: 16 KiB of stack, which stay in L1. */
enum { STAGE_BYTES = 512, WORD_BYTES = 4, AWQ_ROWS = 8, LANES = 4 };

static int64_t minimum(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Columns column .. column+columns-1 of row r, whose codes begin at `codes` after `skip` others. */
static void decode(const kt_kernels *kernels, const ktq_source *source, int64_t r, int64_t column, int64_t columns,
                   const uint8_t *codes, int64_t skip, uint16_t *out) {
    int64_t grid = (source->first_row + r) / source->block_rows * source->scales_per_row;
    int64_t first = source->first_column + column;
    kt_codes row = {
        .bits = kt_column_bits(source->kind),
        .flip = source->kind == KTQ_INT8_SIGNED ? 0x80 : 0,
        .codes = codes,
        .skip = skip,
        .columns = columns,
        .scales = source->scales + grid,
        .zeros = source->zeros ? source->zeros + grid : NULL,
        .first = first,
        .group = source->block_columns,
        .column_groups = source->column_groups ? source->column_groups + first : NULL,
    };
    kernels->decode_codes(&row, out);
}

/* Words of a row that are column_stride apart. */
static void decode_words(const kt_kernels *kernels, const ktq_source *source, int64_t first, int64_t rows, int64_t k,
                         uint16_t *out) {
    uint8_t stage[KT_PANEL_ROWS * STAGE_BYTES];
    const uint8_t *in = (const uint8_t *)source->values + first * source->row_stride;
    int64_t in_word = 32 / kt_column_bits(source->kind), in_stage = STAGE_BYTES / WORD_BYTES * in_word;
    for (int64_t c = 0, columns; c < k; c += columns) {
        int64_t word = (source->skip + c) / in_word, skip = (source->skip + c) % in_word;
        columns = minimum(k - c, in_stage - skip);
        kernels->transpose(WORD_BYTES, in + word * source->column_stride, source->column_stride, rows,
                           (skip + columns + in_word - 1) / in_word, stage, STAGE_BYTES);
        for (int64_t r = 0; r < rows; r++)
            decode(kernels, source, first + r, c, columns, stage + r * STAGE_BYTES, skip, out + r * k + c);
    }
}

typedef uint32_t lanes __attribute__((vector_size(WORD_BYTES * LANES)));

/* Swaps the upper bits of *a with the lower ones of *b, within units of twice `shift` bits; mask: the lower ones. */
static inline void swap(lanes *a, lanes *b, uint32_t mask, int shift) {
    lanes differ = ((*a >> shift) ^ *b) & mask;
    *b ^= differ;
    *a ^= differ << shift;
}

/* 8 columns of `words` AWQ words each: 8 codes of 8 * words rows, row r at out + r * STAGE_BYTES. Each lane is a matrix
   of 8 x 8 codes, transposed by swapping its quarters, their quarters and theirs. */
static void transpose_awq(const uint8_t *in, int64_t column_stride, int64_t columns, int64_t words, uint8_t *out) {
    static const uint8_t row_order[AWQ_ROWS] = {0, 2, 4, 6, 1, 3, 5, 7};
    lanes w[AWQ_ROWS] = {0};
    for (int64_t c = 0; c < columns; c++) {
        if (words == LANES)
            memcpy(&w[c], in + c * column_stride, sizeof w[c]);
        else
            memcpy(&w[c], in + c * column_stride, (size_t)(words * WORD_BYTES));
    }
    for (int i = 0; i < 4; i++) swap(&w[i], &w[i + 4], 0x0000ffff, 16);
    for (int i = 0; i < 8; i += i % 2 ? 3 : 1) swap(&w[i], &w[i + 2], 0x00ff00ff, 8);
    for (int i = 0; i < 8; i += 2) swap(&w[i], &w[i + 1], 0x0f0f0f0f, 4);
    for (int i = 0; i < AWQ_ROWS; i++)
        for (int64_t j = 0; j < words; j++)
            memcpy(out + (AWQ_ROWS * j + row_order[i]) * STAGE_BYTES, (const uint8_t *)&w[i] + WORD_BYTES * j,
                   WORD_BYTES);
}

/* AWQ: words of 8 rows. */
static void decode_awq(const kt_kernels *kernels, const ktq_source *source, int64_t first, int64_t rows, int64_t k,
                       uint16_t *out) {
    uint8_t stage[AWQ_ROWS * LANES * STAGE_BYTES];
    const int64_t in_stage = STAGE_BYTES * 2, top = source->skip + first, bottom = top + rows;
    for (int64_t word = top / AWQ_ROWS; word * AWQ_ROWS < bottom; word += LANES) {
        int64_t words = minimum(LANES, (bottom + AWQ_ROWS - 1) / AWQ_ROWS - word);
        const uint8_t *in = (const uint8_t *)source->values + word * WORD_BYTES;
        for (int64_t c = 0, columns; c < k; c += columns) {
            columns = minimum(k - c, in_stage);
            for (int64_t j = 0; j < columns; j += AWQ_ROWS)
                transpose_awq(in + (c + j) * source->column_stride, source->column_stride,
                              minimum(columns - j, AWQ_ROWS), words, stage + j / 2);
            for (int64_t i = 0; i < AWQ_ROWS * words; i++) {
                int64_t r = word * AWQ_ROWS + i - top;
                if (r >= 0 && r < rows)
                    decode(kernels, source, first + r, c, columns, stage + i * STAGE_BYTES, 0, out + r * k + c);
            }
        }
    }
}

void kt_decode_integers(const kt_kernels *kernels, const ktq_source *source, int64_t first, int64_t rows, int64_t k,
                        uint16_t *out) {
    if (source->kind == KTQ_INT4_AWQ) {
        decode_awq(kernels, source, first, rows, k, out);
    } else if (!kt_is_row_contiguous(source)) {
        decode_words(kernels, source, first, rows, k, out);
    } else {
        for (int64_t r = first; r < first + rows; r++, out += k)
            decode(kernels, source, r, 0, k, (const uint8_t *)source->values + r * source->row_stride, source->skip,
                   out);
    }
}
