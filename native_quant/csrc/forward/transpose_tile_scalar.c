/* The transpose of a tile of BF16. */
#include <string.h>

#include "kernels.h"

static int64_t place(int row, int column) {
    return row / KT_HALF_ROWS * KT_HALF_BYTES + column / 2 * 64 + row % KT_HALF_ROWS * 4 + column % 2 * 2;
}

void kt_transpose_tile_scalar(const uint8_t *tile, uint8_t *out) {
    for (int row = 0; row < KT_PANEL_ROWS; row++)
        for (int column = 0; column < KT_PANEL_ROWS; column++)
            memcpy(out + place(column, row), tile + place(row, column), 2);
}
