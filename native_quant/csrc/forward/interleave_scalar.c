/* Pairs of rows to the lines of a panel of BF16. */
#include "bf16.h"
#include "kernels.h"

static uint16_t item(int item_bytes, const uint8_t *row, int64_t column, const float *scale) {
    if (item_bytes == 1) return kt_to_bf16((float)(int8_t)row[column] * *scale);
    uint16_t bits = kt_load16(row + 2 * column);
    return scale ? kt_to_bf16(kt_from_bf16(bits) * *scale) : bits;
}

void kt_interleave_scalar(int item_bytes, const uint8_t *rows, int64_t row_stride, int64_t pairs, const float *scale,
                          int64_t at, uint16_t *panel) {
    for (int64_t i = 0; i < 2 * pairs; i++, rows += row_stride) {
        uint16_t *line = kt_panel_line(panel, at + i / 2);
        for (int64_t c = 0; c < KT_PANEL_ROWS; c++)
            line[c / KT_HALF_ROWS * (KT_HALF_BYTES / 2) + c % KT_HALF_ROWS * 2 + i % 2] =
                item(item_bytes, rows, c, scale ? scale + i : NULL);
    }
}
