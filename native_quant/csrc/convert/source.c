/* From a linear as it is stored to BF16 rows: any encoding, either axis contiguous, any grid of scales. */
#include <string.h>

#include "bf16.h"
#include "kernels.h"

/* Columns that are transposed and decoded at a time: 32 rows of 128 float32 are 16 KiB of stack, and stay in L1. */
enum { STAGE_COLUMNS = 128 };

/* FP8 columns with one scale that are decoded by a table (fp8_table.h); fewer are not worth making it. */
enum { TABLE_COLUMNS = 64 };

/* Whether rows are decoded one by one, in groups of columns with one scale. */
static int is_grouped(const ktq_source *source) {
    return source->kind == KTQ_FP4_E2M1 || (source->kind == KTQ_FP8_E4M3 && source->column_stride == 1 &&
                                            source->block_columns < TABLE_COLUMNS);
}

static int64_t minimum(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* rows x columns values, whose first is element (row, column) of the source and lies at `in`: a rectangle for each
 * scale. */
static void decode_block(const kt_kernels *kernels, const ktq_source *source, const uint8_t *in, int64_t in_stride,
                         int64_t row, int64_t rows, int64_t column, int64_t columns, uint16_t *out, int64_t out_pitch) {
    if (source->kind == KTQ_BF16) {
        for (int64_t r = 0; r < rows; r++)
            memcpy(out + r * out_pitch, in + r * in_stride, (size_t)columns * sizeof *out);
        return;
    }
    if (source->kind != KTQ_FP8_E4M3) {
        kernels->decode(source->kind, in, in_stride, rows, columns, 1.0f, out, out_pitch);
        return;
    }
    for (int64_t r = 0, high; r < rows; r += high) {
        int64_t y = source->first_row + row + r;
        high = minimum(rows - r, source->block_rows - y % source->block_rows);
        const float *scales = source->scales + y / source->block_rows * source->scales_per_row;
        for (int64_t c = 0, wide; c < columns; c += wide) {
            int64_t x = source->first_column + column + c;
            wide = minimum(columns - c, source->block_columns - x % source->block_columns);
            kernels->decode(source->kind, in + r * in_stride + c, in_stride, high, wide,
                            scales[x / source->block_columns], out + r * out_pitch + c, out_pitch);
        }
    }
}

/* Rows first..first+rows-1, each in groups of columns: out[rows][k]. */
static void decode_grouped(const kt_kernels *kernels, const ktq_source *source, int64_t first, int64_t rows, int64_t k,
                           uint16_t *out) {
    for (int64_t r = first; r < first + rows; r++, out += k) {
        const float *scales = source->scales + (source->first_row + r) / source->block_rows * source->scales_per_row;
        const uint8_t *codes = (const uint8_t *)source->values + r * source->row_stride;
        kt_floats row = {source->kind, codes, source->skip, k, scales, source->first_column, source->block_columns};
        kernels->decode_floats(&row, out);
    }
}

/* Whether a source whose columns are contiguous has so few with one scale that they are decoded before they are
 * transposed, and not after. */
static int is_grouped_down(const ktq_source *source) {
    return source->kind == KTQ_FP8_E4M3 && source->block_columns < TABLE_COLUMNS &&
           source->block_rows >= source->block_columns;
}

/* At most 32 rows first..first+rows-1, each column in groups of rows: out[rows][k]. */
static void decode_grouped_down(const kt_kernels *kernels, const ktq_source *source, int64_t first, int64_t rows,
                                int64_t k, uint16_t *out) {
    uint16_t stage[STAGE_COLUMNS * KT_PANEL_ROWS];
    const uint8_t *in = (const uint8_t *)source->values + first * source->row_stride;
    for (int64_t c = 0; c < k; c += STAGE_COLUMNS) {
        int64_t columns = minimum(k - c, STAGE_COLUMNS);
        for (int64_t j = 0; j < columns; j++) {
            int64_t x = (source->first_column + c + j) / source->block_columns;
            for (int64_t r = 0, high; r < rows; r += high) {
                int64_t y = source->first_row + first + r;
                high = minimum(rows - r, source->block_rows - y % source->block_rows);
                const float *scale = source->scales + y / source->block_rows * source->scales_per_row + x;
                kt_floats column = {source->kind, in + (c + j) * source->column_stride + r, 0, high, scale, 0, high};
                kernels->decode_floats(&column, stage + j * KT_PANEL_ROWS + r);
            }
        }
        kernels->transpose(sizeof *out, (const uint8_t *)stage, KT_PANEL_ROWS * sizeof *out, rows, columns,
                           (uint8_t *)(out + c), k * (int64_t)sizeof *out);
    }
}

/* Rows first..first+rows-1 of blocks: out[rows][k]. Of a block at either end, only the columns that are wanted. */
static void decode_blocks(const kt_kernels *kernels, const ktq_source *source, int64_t first, int64_t rows, int64_t k,
                          uint16_t *out) {
    kt_block block = kt_get_block(source->kind);
    for (int64_t r = first; r < first + rows; r++, out += k) {
        const uint8_t *in = (const uint8_t *)source->values + r * source->row_stride;
        for (int64_t c = 0, count; c < k; c += count) {
            int64_t at = source->skip + c, inside = at % block.columns;
            const uint8_t *blocks = in + at / block.columns * block.bytes;
            if (inside == 0 && k - c >= block.columns) {
                count = (k - c) / block.columns * block.columns;
                kernels->decode_blocks(source->kind, blocks, count / block.columns, out + c);
            } else {
                uint16_t whole[KT_BLOCK_COLUMNS];
                count = minimum(k - c, block.columns - inside);
                kernels->decode_blocks(source->kind, blocks, 1, whole);
                memcpy(out + c, whole + inside, (size_t)count * sizeof *out);
            }
        }
    }
}

/* Rows first..first+rows-1: out[rows][k]. At most 32 if the columns are contiguous. */
static void decode_rows(const kt_kernels *kernels, const ktq_source *source, int64_t first, int64_t rows, int64_t k,
                        uint16_t *out) {
    if (is_grouped(source)) {
        decode_grouped(kernels, source, first, rows, k, out);
        return;
    }
    if (kt_is_integer(source->kind)) {
        kt_decode_integers(kernels, source, first, rows, k, out);
        return;
    }
    if (kt_get_block(source->kind).columns) {
        decode_blocks(kernels, source, first, rows, k, out);
        return;
    }
    int bytes = kt_column_bits(source->kind) / 8;
    const uint8_t *in = (const uint8_t *)source->values + first * source->row_stride;
    if (kt_is_row_contiguous(source)) {
        decode_block(kernels, source, in, source->row_stride, first, rows, 0, k, out, k);
    } else if (source->kind == KTQ_BF16) {
        kernels->transpose(bytes, in, source->column_stride, rows, k, (uint8_t *)out, k * bytes);
    } else if (is_grouped_down(source)) {
        decode_grouped_down(kernels, source, first, rows, k, out);
    } else {
        uint8_t stage[KT_PANEL_ROWS * STAGE_COLUMNS * 4];
        for (int64_t c = 0; c < k; c += STAGE_COLUMNS) {
            int64_t columns = minimum(k - c, STAGE_COLUMNS);
            kernels->transpose(bytes, in + c * source->column_stride, source->column_stride, rows, columns, stage,
                               STAGE_COLUMNS * bytes);
            decode_block(kernels, source, stage, STAGE_COLUMNS * bytes, first, rows, c, columns, out + c, k);
        }
    }
}

const uint8_t *kt_bf16_row(const kt_kernels *kernels, const ktq_source *source, int64_t r, int64_t k,
                           uint16_t *scratch) {
    if (source->kind == KTQ_BF16 && kt_is_row_contiguous(source))
        return (const uint8_t *)source->values + r * source->row_stride;
    /* Columns that are contiguous: a whole panel, so that whole cache lines are read. */
    int64_t rows = kt_is_row_contiguous(source) ? KT_HALF_ROWS : KT_PANEL_ROWS;
    if (r % rows == 0) decode_rows(kernels, source, r, rows, k, scratch);
    return (const uint8_t *)(scratch + r % rows * k);
}

const uint8_t *kt_bf16_rows(const kt_kernels *kernels, const ktq_source *source, int64_t first, int64_t rows, int64_t k,
                            uint16_t *scratch, int64_t *row_stride) {
    int as_stored = source->kind == KTQ_BF16 && kt_is_row_contiguous(source);
    *row_stride = as_stored ? source->row_stride : k * (int64_t)sizeof *scratch;
    if (as_stored) return (const uint8_t *)source->values + first * source->row_stride;
    decode_rows(kernels, source, first, rows, k, scratch);
    return (const uint8_t *)scratch;
}

int ktq_decode(int64_t n, int64_t k, const ktq_source *source, uint16_t *out) {
    int error = source && out ? kt_check_source(source, n, k) : KTQ_EINVAL;
    if (error) return error;
    const kt_kernels *kernels = kt_current();
    kt_fp_state state = kt_enter();
    for (int64_t first = 0; first < n; first += KT_PANEL_ROWS)
        decode_rows(kernels, source, first, minimum(n - first, KT_PANEL_ROWS), k, out + first * k);
    kt_leave(state);
    return KTQ_OK;
}
