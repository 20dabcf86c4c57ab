/* From a linear as it is stored to BF16 rows: any encoding, either axis contiguous, any grid of scales. */
#include <string.h>

#include "bf16.h"
#include "kernels.h"

/* Columns that are transposed and decoded at a time: 32 rows of 128 float32 are 16 KiB of stack, and stay in L1. */
enum { STAGE_COLUMNS = 128 };

int kt_item_bytes(int kind) {
    switch (kind) {
    case KTQ_BF16:
    case KTQ_FP16: return 2;
    case KTQ_F32: return 4;
    case KTQ_FP8_E4M3: return 1;
    }
    return 0;
}

int kt_is_row_contiguous(const ktq_source *source) {
    return source->column_stride == kt_item_bytes(source->kind);
}

int kt_check_source(const ktq_source *source, int64_t n, int64_t k) {
    int bytes = kt_item_bytes(source->kind);
    if (!bytes || !source->values || n <= 0 || k <= 0) return KTQ_EINVAL;
    if (source->column_stride != bytes && source->row_stride != bytes) return KTQ_EINVAL;
    if (source->kind != KTQ_FP8_E4M3) return KTQ_OK;
    if (!source->scales || source->block_rows <= 0 || source->block_columns <= 0) return KTQ_EINVAL;
    if (source->first_row < 0 || source->first_column < 0) return KTQ_EINVAL;
    if ((source->first_column + k - 1) / source->block_columns >= source->scales_per_row) return KTQ_EINVAL;
    return KTQ_OK;
}

/* `count` values of row `row` that begin at column `column`, lying one after the other at `in`: a run per scale. */
static void decode_row(const kt_kernels *kernels, const ktq_source *source, const uint8_t *in, int64_t row, int64_t column,
                       int64_t count, uint16_t *out) {
    if (source->kind == KTQ_BF16) {
        memcpy(out, in, (size_t)count * sizeof *out);
    } else if (source->kind != KTQ_FP8_E4M3) {
        kernels->decode(source->kind, in, count, 1.0f, out);
    } else {
        const float *scales = source->scales + (source->first_row + row) / source->block_rows * source->scales_per_row;
        int64_t at = source->first_column + column;
        for (int64_t done = 0; done < count;) {
            int64_t block = (at + done) / source->block_columns;
            int64_t left_in_block = (block + 1) * source->block_columns - (at + done);
            int64_t run = left_in_block < count - done ? left_in_block : count - done;
            kernels->decode(source->kind, in + done, run, scales[block], out + done);
            done += run;
        }
    }
}

static void decode_transposed(const kt_kernels *kernels, const ktq_source *source, int64_t first, int64_t rows, int64_t k,
                              uint16_t *out) {
    int bytes = kt_item_bytes(source->kind);
    const uint8_t *in = (const uint8_t *)source->values + first * source->row_stride;
    if (source->kind == KTQ_BF16) {
        kernels->transpose(bytes, in, source->column_stride, rows, k, (uint8_t *)out, k * 2);
        return;
    }
    uint8_t stage[KT_STRIP_ROWS * STAGE_COLUMNS * 4];
    for (int64_t column = 0; column < k; column += STAGE_COLUMNS) {
        int64_t columns = k - column < STAGE_COLUMNS ? k - column : STAGE_COLUMNS;
        kernels->transpose(bytes, in + column * source->column_stride, source->column_stride, rows, columns, stage,
                           STAGE_COLUMNS * bytes);
        for (int64_t r = 0; r < rows; r++)
            decode_row(kernels, source, stage + r * STAGE_COLUMNS * bytes, first + r, column, columns, out + r * k + column);
    }
}

/* Rows first..first+rows-1: out[rows][k]. At most 32 if the columns are contiguous. */
static void decode_rows(const kt_kernels *kernels, const ktq_source *source, int64_t first, int64_t rows, int64_t k, uint16_t *out) {
    if (!kt_is_row_contiguous(source)) {
        decode_transposed(kernels, source, first, rows, k, out);
        return;
    }
    for (int64_t r = 0; r < rows; r++) {
        const uint8_t *in = (const uint8_t *)source->values + (first + r) * source->row_stride;
        decode_row(kernels, source, in, first + r, 0, k, out + r * k);
    }
}

const uint8_t *kt_bf16_row(const kt_kernels *kernels, const ktq_source *source, int64_t r, int64_t k, uint16_t *scratch) {
    if (source->kind == KTQ_BF16 && kt_is_row_contiguous(source)) return (const uint8_t *)source->values + r * source->row_stride;
    /* Columns that are contiguous: a strip at once, so that whole cache lines are read. */
    int64_t rows = kt_is_row_contiguous(source) ? 1 : KT_STRIP_ROWS;
    uint16_t *row = scratch + r % KT_STRIP_ROWS * k;
    if (r % rows == 0) decode_rows(kernels, source, r, rows, k, row);
    return (const uint8_t *)row;
}

int ktq_decode(int64_t n, int64_t k, const ktq_source *source, uint16_t *out) {
    int error = source && out ? kt_check_source(source, n, k) : KTQ_EINVAL;
    if (error) return error;
    const kt_kernels *kernels = kt_current();
    unsigned state = kt_enter();
    for (int64_t first = 0; first < n; first += KT_STRIP_ROWS)
        decode_rows(kernels, source, first, n - first < KT_STRIP_ROWS ? n - first : KT_STRIP_ROWS, k, out + first * k);
    kt_leave(state);
    return KTQ_OK;
}
