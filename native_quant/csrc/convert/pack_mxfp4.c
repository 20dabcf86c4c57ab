/* MXFP4 in panels: quantized from BF16, or as it is where the source has the same numbers. */
#include <stddef.h>
#include <string.h>

#include "bf16.h"
#include "kernels.h"
#include "panels.h"

/* The first of 16 rows that is not finite. */
static int first_bad(const kt_kernels *kernels, const uint8_t *rows, int64_t row_stride, int64_t k) {
    int r = 0;
    while (kt_row_amax(kernels, rows + r * row_stride, k) < KT_BF16_INFINITY) r++;
    return r;
}

/* Returns the first row that is not finite, or -1. */
static int64_t quantize(const kt_kernels *kernels, const ktq_source *source, int64_t n, int64_t k, uint16_t *scratch,
                        uint8_t *codes, uint8_t *exponents) {
    for (int64_t first = 0; first < n; first += KT_PANEL_ROWS) {
        int64_t row_stride;
        const uint8_t *panel = kt_bf16_rows(kernels, source, first, KT_PANEL_ROWS, k, scratch, &row_stride);
        for (int half = 0; half < 2; half++) {
            const uint8_t *rows = panel + half * KT_HALF_ROWS * row_stride;
            uint8_t *to = codes + first * k / 2 + half * KT_MXFP4_HALF_BYTES;
            uint8_t *row_scales = exponents + first * k / KT_GROUP_COLUMNS + half * KT_HALF_ROWS;
            int last = half && (panel == (const uint8_t *)scratch || first + KT_PANEL_ROWS == n);
            kt_prefetch prefetch = {last ? rows : rows + KT_HALF_ROWS * row_stride, last ? 0 : row_stride,
                                    last ? 0 : 16};
            const uint8_t *block = rows;
            for (int64_t c = 0; c < k; c += KT_GROUP_COLUMNS) {
                if (!kernels->pack_mxfp4(block, row_stride, to, row_scales, &prefetch))
                    return first + half * KT_HALF_ROWS + first_bad(kernels, rows, row_stride, k);
                block += 2 * KT_GROUP_COLUMNS;
                prefetch.first += 2 * KT_GROUP_COLUMNS;
                to += 2 * KT_MXFP4_HALF_BYTES;
                row_scales += KT_PANEL_ROWS;
            }
        }
    }
    return -1;
}

int ktq_pack_mxfp4(int64_t n, int64_t k, const ktq_source *source, uint16_t *scratch, uint8_t *codes,
                   uint8_t *exponents, int64_t *bad_row) {
    int error = kt_check_panels(KT_GROUP_COLUMNS, n, k);
    if (!error) error = source && scratch && codes && exponents && bad_row ? kt_check_source(source, n, k) : KTQ_EINVAL;
    if (error) return error;

    kt_fp_state state = kt_enter();
    const kt_kernels *kernels = kt_current();
    *bad_row = -1;
    if (!kt_has_mxfp4(source) || !kt_keep_mxfp4(kernels, source, n, k, codes, exponents, bad_row))
        *bad_row = quantize(kernels, source, n, k, scratch, codes, exponents);
    kt_leave(state);
    return *bad_row < 0 ? KTQ_OK : KTQ_ENONFINITE;
}

int ktq_mxfp4_rows(int64_t n, int64_t k, const uint8_t *codes, const uint8_t *exponents, uint8_t *rows,
                   uint8_t *row_exponents) {
    int error = kt_check_panels(KT_GROUP_COLUMNS, n, k);
    if (!error && (!codes || !exponents || !rows || !row_exponents)) error = KTQ_EINVAL;
    if (error) return error;
    int64_t blocks = k / KT_GROUP_COLUMNS;
    for (int64_t first = 0; first < n; first += KT_PANEL_ROWS) {
        kt_unpack_nibbles(codes + first * k / 2, blocks, 0, rows + first * k / 2, k / 2);
        for (int64_t b = 0; b < blocks; b++)
            for (int64_t r = first; r < first + KT_PANEL_ROWS; r++) row_exponents[r * blocks + b] = *exponents++;
    }
    return KTQ_OK;
}
