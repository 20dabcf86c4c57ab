/* BF16 as it is. */
#include <stddef.h>

#include "bf16.h"
#include "kernels.h"
#include "panels.h"

/* 32 rows in kt-kernel's order. first: of the rows, in a weight of n rows. */
static void put_blocks(const kt_kernels *kernels, const uint8_t *rows, int64_t row_stride, int64_t n, int64_t k,
                       int64_t first, uint16_t *codes) {
    int64_t block = first / KTQ_BF16_BLOCK_ROWS * KTQ_BF16_BLOCK_ROWS;
    int64_t block_rows = n - block < KTQ_BF16_BLOCK_ROWS ? n - block : KTQ_BF16_BLOCK_ROWS;
    for (int64_t c = 0; c < k; c += KTQ_BF16_BLOCK_COLUMNS) {
        int64_t columns = k - c < KTQ_BF16_BLOCK_COLUMNS ? k - c : KTQ_BF16_BLOCK_COLUMNS;
        uint16_t *panel = codes + block * k + c * block_rows + (first - block) * columns;
        kt_reorder_panel(kernels, 2, rows + 2 * c, row_stride, columns, (uint8_t *)panel);
    }
}

int ktq_pack_bf16(int order, int64_t n, int64_t k, const ktq_source *source, uint16_t *scratch, uint16_t *codes,
                  int64_t *bad_row) {
    int error = kt_check_panels(KTQ_BF16_MULTIPLE, n, k);
    if (!error) error = source && scratch && codes && bad_row ? kt_check_source(source, n, k) : KTQ_EINVAL;
    if (!error && (order < KTQ_PANELS || order > KTQ_BLOCKS)) error = KTQ_EINVAL;
    if (error) return error;

    const kt_kernels *kernels = kt_current();
    kt_fp_state state = kt_enter();
    *bad_row = -1;
    for (int64_t first = 0; first < n; first += KT_PANEL_ROWS) {
        int64_t row_stride;
        const uint8_t *rows = kt_bf16_rows(kernels, source, first, KT_PANEL_ROWS, k, scratch, &row_stride);
        for (int r = 0; r < KT_PANEL_ROWS && *bad_row < 0; r++)
            if (kt_row_amax(kernels, rows + r * row_stride, k) >= KT_BF16_INFINITY) *bad_row = first + r;
        if (*bad_row >= 0) break;
        if (order == KTQ_BLOCKS)
            put_blocks(kernels, rows, row_stride, n, k, first, codes);
        else
            kt_put_rows(kernels, order, 2, rows, row_stride, k, (uint8_t *)(codes + first * k));
    }
    kt_leave(state);
    return *bad_row < 0 ? KTQ_OK : KTQ_ENONFINITE;
}
