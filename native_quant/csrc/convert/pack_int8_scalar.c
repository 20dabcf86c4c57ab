/* AMXINT8 half tile: 16 rows x 64 columns, a byte each. */
#include "kernels.h"
#include "quantize_scalar.h"

void kt_pack_int8_scalar(const uint8_t *rows, int64_t row_stride, int64_t columns, const float *reciprocal,
                         uint8_t *tiles, const kt_prefetch *prefetch) {
    (void)prefetch;
    for (int64_t r = 0; r < KT_HALF_ROWS; r++) {
        const uint8_t *row = rows + r * row_stride;
        for (int64_t c = 0; c < columns; c++) {
            uint8_t *tile = tiles + c / 64 * KT_TILE_BYTES;
            tile[kt_half_byte_offset(r, c % 64)] = (uint8_t)kt_to_int8(kt_load16(row + 2 * c), reciprocal[r]);
        }
    }
}
