/* GPTQ, a block of columns or all of them: 32 rows at a time are transposed, so that a column is a few vectors,
 * processed while they are in L1 and L2, and transposed back. Knows the order of rows, but no instruction set. */
#include <string.h>

#include "kernels.h"

/* Rows of `width` float32, `pitch` apart -> tile[c][r]; lanes without a row are 0. */
static void load_tile(const kt_kernels *kernels, const float *rows, int64_t pitch, int64_t count, int64_t width,
                      float *tile) {
    for (int64_t c = 0; c < width; c += KT_PANEL_ROWS) {
        int64_t columns = width - c < KT_PANEL_ROWS ? width - c : KT_PANEL_ROWS;
        if (count < KT_PANEL_ROWS)
            memset(tile + c * KT_PANEL_ROWS, 0, (size_t)(columns * KT_PANEL_ROWS) * sizeof *tile);
        /* To the kernel, the columns are rows, and the rows that are far apart columns. */
        kernels->transpose(4, (const uint8_t *)(rows + c), pitch * 4, columns, count,
                           (uint8_t *)(tile + c * KT_PANEL_ROWS), KT_PANEL_ROWS * 4);
    }
}

static void store_tile(const kt_kernels *kernels, const float *tile, int64_t count, int64_t width, float *rows,
                       int64_t pitch) {
    kernels->transpose(4, (const uint8_t *)tile, KT_PANEL_ROWS * 4, count, width, (uint8_t *)rows, pitch * 4);
}

int ktq_gptq_block(int least, int most, int precision, int kind, int64_t n, int64_t width, const float *inverse,
                   const float *scale, float *weight, float *value, float *error) {
    if (least < INT8_MIN || least > 0 || most < 0 || most > INT8_MAX) return KTQ_EINVAL;
    if (precision < 0 || precision > 7) return KTQ_EINVAL;
    if ((kind != KTQ_BF16 && kind != KTQ_F32) || n < 1) return KTQ_EINVAL;
    if (width < 1 || width > KTQ_GPTQ_COLUMNS || !inverse || !scale || !weight || !value || !error) return KTQ_EINVAL;

    _Alignas(64) float tiles[3][KTQ_GPTQ_COLUMNS * KT_PANEL_ROWS];
    const kt_gptq job = {{least, most, precision}, kind == KTQ_BF16, width, inverse, tiles[0], tiles[1], tiles[2]};
    const kt_kernels *kernels = kt_current();
    kt_fp_state state = kt_enter();
    for (int64_t first = 0; first < n; first += KT_PANEL_ROWS) {
        int64_t count = n - first < KT_PANEL_ROWS ? n - first : KT_PANEL_ROWS, at = first * width;
        load_tile(kernels, weight + at, width, count, width, job.weight);
        load_tile(kernels, scale + at, width, count, width, job.scale);
        kernels->gptq(&job);
        store_tile(kernels, job.weight, count, width, weight + at, width);
        store_tile(kernels, job.scale, count, width, value + at, width);
        store_tile(kernels, job.error, count, width, error + at, width);
    }
    kt_leave(state);
    return KTQ_OK;
}

enum { SLICE = KTQ_SLICE_COLUMNS };

/* A block of the factor, [width][width], of which the upper triangle matters. */
static void copy_block(const float *slices, int64_t k, int64_t first, int64_t width, float *inverse) {
    for (int64_t c = 0; c < width; c += SLICE)
        for (int64_t i = 0; i < width; i++)
            memcpy(inverse + i * width + c, slices + (first + c) * k + (first + i) * SLICE, SLICE * sizeof *inverse);
}

/* The errors of 32 rows, [k][32], become their gradient, from the last column to the first. */
static void solve(const kt_kernels *kernels, const float *slices, int64_t k, float *errors) {
    for (int64_t first = k - SLICE; first >= 0; first -= SLICE) {
        const float *slice = slices + first * k, *diagonal = slice + first * SLICE;
        float *to = errors + first * KT_PANEL_ROWS;
        for (int64_t c = 0; c < SLICE; c++) {
            const float reciprocal = 1.0f / diagonal[c * SLICE + c];
            for (int r = 0; r < KT_PANEL_ROWS; r++) to[c * KT_PANEL_ROWS + r] *= reciprocal;
        }
        const int64_t after = first + SLICE;
        kernels->slice_products(k - after, slice + after * SLICE, errors + after * KT_PANEL_ROWS, to);
        for (int64_t i = SLICE - 1; i > 0; i--) {
            float factors[SLICE] = {0};
            memcpy(factors, diagonal + i * SLICE, (size_t)i * sizeof *factors);
            kernels->slice_products(1, factors, to + i * KT_PANEL_ROWS, to);
        }
    }
}

int ktq_compensate(int least, int most, int precision, int64_t n, int64_t k, const float *slices, const float *scale,
                   float *weight, float *gradient, float *scratch) {
    if (least < INT8_MIN || least > 0 || most < 0 || most > INT8_MAX) return KTQ_EINVAL;
    if (precision < 0 || precision > 7) return KTQ_EINVAL;
    if (n < 1 || k < 1 || k % SLICE || !slices || !scale || !weight || !gradient || !scratch) return KTQ_EINVAL;

    _Alignas(64) float values[KTQ_GPTQ_COLUMNS * KT_PANEL_ROWS], inverse[KTQ_GPTQ_COLUMNS * KTQ_GPTQ_COLUMNS];
    float *remainder = scratch, *errors = scratch + k * KT_PANEL_ROWS;
    const kt_kernels *kernels = kt_current();
    kt_fp_state state = kt_enter();
    for (int64_t row = 0; row < n; row += KT_PANEL_ROWS) {
        int64_t count = n - row < KT_PANEL_ROWS ? n - row : KT_PANEL_ROWS, at = row * k;
        load_tile(kernels, weight + at, k, count, k, remainder);
        for (int64_t first = 0; first < k; first += KTQ_GPTQ_COLUMNS) {
            int64_t width = k - first < KTQ_GPTQ_COLUMNS ? k - first : KTQ_GPTQ_COLUMNS;
            for (int64_t c = first; c < first + width; c += SLICE)
                kernels->slice_products(first, slices + c * k, errors, remainder + c * KT_PANEL_ROWS);
            copy_block(slices, k, first, width, inverse);
            load_tile(kernels, scale + at + first, k, count, width, values);
            kernels->gptq(&(kt_gptq){{least, most, precision},
                                     0,
                                     width,
                                     inverse,
                                     remainder + first * KT_PANEL_ROWS,
                                     values,
                                     errors + first * KT_PANEL_ROWS});
            store_tile(kernels, values, count, width, weight + at + first, k);
        }
        solve(kernels, slices, k, errors);
        store_tile(kernels, errors, count, k, gradient + at, k);
    }
    kt_leave(state);
    return KTQ_OK;
}
