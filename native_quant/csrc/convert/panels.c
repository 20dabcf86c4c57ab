/* Weights in panels of 32 rows (bytes.md, Panels): the order that kernels of floating-point numbers multiply. */
#include <stddef.h>
#include <string.h>

#include "bf16.h"
#include "kernels.h"
#include "panels.h"

int kt_check_panels(int64_t multiple, int64_t n, int64_t k) {
    return n < 1 || k < 1 || n % multiple || k % multiple ? KTQ_ESHAPE : KTQ_OK;
}

uint16_t kt_row_amax(const kt_kernels *kernels, const uint8_t *row, int64_t k) {
    int64_t whole = k / 64 * 64;
    uint16_t amax = whole ? kernels->amax(row, whole) : 0, rest = kt_amax_scalar(row + 2 * whole, k - whole);
    return amax > rest ? amax : rest;
}

void kt_reorder_panel(const kt_kernels *kernels, int item_bytes, const uint8_t *rows, int64_t row_stride, int64_t k,
                  uint8_t *panel) {
    int64_t half_row = KT_HALF_ROWS * 2 * item_bytes; /* a pair of columns of 16 rows */
    for (int64_t c = 0; c < k; c += KT_BLOCK_PAIRS * 2)
        for (int half = 0; half < 2; half++) {
            kernels->transpose(2 * item_bytes, rows + half * KT_HALF_ROWS * row_stride + c * item_bytes, row_stride,
                               KT_BLOCK_PAIRS, KT_HALF_ROWS, panel, half_row);
            panel += KT_BLOCK_PAIRS * half_row;
        }
}

void kt_put_rows(const kt_kernels *kernels, int order, int item_bytes, const uint8_t *rows, int64_t row_stride,
                 int64_t k, uint8_t *out) {
    if (order == KTQ_PANELS) {
        kt_reorder_panel(kernels, item_bytes, rows, row_stride, k, out);
        return;
    }
    for (int64_t r = 0; r < KT_PANEL_ROWS; r++)
        memcpy(out + r * k * item_bytes, rows + r * row_stride, (size_t)(k * item_bytes));
}
