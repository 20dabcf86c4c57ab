/* FP8 E4M3 with a scale for each block of 128 x 128 (numerics.md, section 9): rounded, or kept as it is
 * where the source has just such blocks. Knows the order of rows, but no instruction set. */
#include <stddef.h>

#include "bf16.h"
#include "kernels.h"
#include "panels.h"

enum { KT_FP8_BLOCK = KTQ_FP8_MULTIPLE }; /* rows and columns that share a scale */

/* A smaller scale would be subnormal, and have fewer bits. */
#define SMALLEST_SCALE 0x1p-126f

static float choose_scale(uint16_t amax) {
    if (!amax) return 1.0f;
    float scale = kt_from_bf16(amax) / 448.0f;
    return scale < SMALLEST_SCALE ? SMALLEST_SCALE : scale;
}

/* Whether the source is FP8 whose blocks are those of the result. */
static int is_kept(const ktq_source *source) {
    return source->kind == KTQ_FP8_E4M3 && source->block_rows == KT_FP8_BLOCK &&
           source->block_columns == KT_FP8_BLOCK && source->first_row % KT_FP8_BLOCK == 0 &&
           source->first_column % KT_FP8_BLOCK == 0;
}

/* Whether one of k codes is NaN: eight at a time, 0x7f without the sign. k: a multiple of 8. */
static int has_nan(const uint8_t *codes, int64_t k) {
    uint64_t seen = 0;
    for (int64_t c = 0; c < k; c += 8) {
        uint64_t eight;
        memcpy(&eight, codes + c, sizeof eight);
        seen |= (eight & 0x7f7f7f7f7f7f7f7f) + 0x0101010101010101;
    }
    return (seen & 0x8080808080808080) != 0;
}

/* Codes and scales of such a source. Returns the first row that holds a NaN, or -1. scratch: 32 * k bytes. */
static int64_t copy_codes(const kt_kernels *kernels, int order, int64_t n, int64_t k, const ktq_source *source,
                          uint8_t *scratch, uint8_t *codes, float *scales) {
    int64_t blocks = k / KT_FP8_BLOCK;
    const float *stored = source->scales + source->first_row / KT_FP8_BLOCK * source->scales_per_row +
                          source->first_column / KT_FP8_BLOCK;
    for (int64_t r = 0; r < n / KT_FP8_BLOCK; r++, stored += source->scales_per_row, scales += blocks)
        memcpy(scales, stored, (size_t)blocks * sizeof *scales);
    for (int64_t first = 0; first < n; first += KT_PANEL_ROWS) {
        const uint8_t *rows = (const uint8_t *)source->values + first * source->row_stride;
        int64_t row_stride = source->row_stride;
        if (!kt_is_row_contiguous(source)) {
            kernels->transpose(1, rows, source->column_stride, KT_PANEL_ROWS, k, scratch, k);
            rows = scratch;
            row_stride = k;
        }
        for (int r = 0; r < KT_PANEL_ROWS; r++)
            if (has_nan(rows + r * row_stride, k)) return first + r;
        kt_put_rows(kernels, order, 1, rows, row_stride, k, codes + first * k);
    }
    return -1;
}

enum { CHUNK = 32 }; /* blocks of a row that are measured before the next row is */

/* The scales of 128 rows. Returns the first row that holds a value that is not finite, or -1. */
static int64_t measure_blocks(const kt_kernels *kernels, const uint8_t *rows, int64_t row_stride, int64_t k,
                              float *scales) {
    int64_t blocks = k / KT_FP8_BLOCK;
    for (int64_t b = 0; b < blocks; b += CHUNK) {
        int64_t count = blocks - b < CHUNK ? blocks - b : CHUNK;
        uint16_t largest[CHUNK] = {0};
        for (int64_t r = 0; r < KT_FP8_BLOCK; r++)
            for (int64_t i = 0; i < count; i++) {
                const uint8_t *columns = rows + r * row_stride + (b + i) * KT_FP8_BLOCK * 2;
                uint16_t amax = kernels->amax(columns, KT_FP8_BLOCK);
                if (amax > largest[i]) largest[i] = amax;
            }
        for (int64_t i = 0; i < count; i++) {
            if (largest[i] >= KT_BF16_INFINITY) {
                int64_t r = 0;
                while (kernels->amax(rows + r * row_stride, k) < KT_BF16_INFINITY) r++;
                return r;
            }
            scales[b + i] = choose_scale(largest[i]);
        }
    }
    return -1;
}

/* Codes and scales of BF16, 128 rows at a time. Returns the first row that holds a value that is not finite, or -1. */
static int64_t round_all(const kt_kernels *kernels, int order, int64_t n, int64_t k, const ktq_source *source,
                         uint16_t *scratch, uint8_t *codes, float *scales) {
    for (int64_t first = 0; first < n; first += KT_FP8_BLOCK, scales += k / KT_FP8_BLOCK) {
        const uint8_t *rows = NULL;
        int64_t row_stride;
        for (int64_t r = 0; r < KT_FP8_BLOCK; r += KT_PANEL_ROWS) {
            const uint8_t *panel =
                kt_bf16_rows(kernels, source, first + r, KT_PANEL_ROWS, k, scratch + r * k, &row_stride);
            if (r == 0) rows = panel;
        }
        int64_t bad = measure_blocks(kernels, rows, row_stride, k, scales);
        if (bad >= 0) return first + bad;
        if (order == KTQ_ROWS) {
            for (int64_t r = 0; r < KT_FP8_BLOCK; r++)
                for (int64_t c = 0; c < k; c += KT_FP8_BLOCK)
                    kernels->e4m3(rows + r * row_stride + 2 * c, KT_FP8_BLOCK, scales[c / KT_FP8_BLOCK],
                                  codes + (first + r) * k + c);
            continue;
        }
        for (int64_t r = 0; r < KT_FP8_BLOCK; r += KT_PANEL_ROWS)
            for (int64_t c = 0; c < k; c += KT_FP8_BLOCK) {
                _Alignas(64) uint16_t values[KT_PANEL_ROWS * KT_FP8_BLOCK];
                const uint8_t *from = rows + r * row_stride + 2 * c;
                kt_reorder_panel(kernels, 2, from, row_stride, KT_FP8_BLOCK, (uint8_t *)values);
                kernels->e4m3((const uint8_t *)values, KT_PANEL_ROWS * KT_FP8_BLOCK, scales[c / KT_FP8_BLOCK],
                              codes + (first + r) * k + c * KT_PANEL_ROWS);
            }
    }
    return -1;
}

int ktq_pack_fp8(int order, int64_t n, int64_t k, const ktq_source *source, uint16_t *scratch, uint8_t *codes,
                 float *scales, int64_t *bad_row) {
    int error = kt_check_panels(KTQ_FP8_MULTIPLE, n, k);
    if (!error) error = source && scratch && codes && scales && bad_row ? kt_check_source(source, n, k) : KTQ_EINVAL;
    if (!error && order != KTQ_PANELS && order != KTQ_ROWS) error = KTQ_EINVAL;
    if (error) return error;

    const kt_kernels *kernels = kt_current();
    kt_fp_state state = kt_enter();
    *bad_row = is_kept(source) ? copy_codes(kernels, order, n, k, source, (uint8_t *)scratch, codes, scales)
                               : round_all(kernels, order, n, k, source, scratch, codes, scales);
    kt_leave(state);
    return *bad_row < 0 ? KTQ_OK : KTQ_ENONFINITE;
}

int ktq_reorder_fp8(int64_t n, int64_t k, const uint8_t *rows, int64_t row_stride, uint8_t *codes, int64_t *bad_row) {
    int error = kt_check_panels(KT_PANEL_ROWS, n, k);
    if (!error && (!rows || row_stride < k || !codes || !bad_row)) error = KTQ_EINVAL;
    if (error) return error;
    for (*bad_row = 0; *bad_row < n; ++*bad_row)
        if (has_nan(rows + *bad_row * row_stride, k)) return KTQ_ENONFINITE;
    *bad_row = -1;
    for (int64_t first = 0; first < n; first += KT_PANEL_ROWS)
        kt_reorder_panel(kt_current(), 1, rows + first * row_stride, row_stride, k, codes + first * k);
    return KTQ_OK;
}
