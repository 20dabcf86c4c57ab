/* AMXINT4 half tile, 16 rows x 128 columns: the byte where AMXINT8 would have column c holds c (low nibble) and c + 64
 * (high). */
#include "kernels.h"
#include "quantize_scalar.h"

/* From the INT8 grid to multiples of 16, half away from zero: the second of the two roundings. -7..7, two's complement.
 */
static unsigned to_nibble(int q8) {
    int magnitude = ((q8 < 0 ? -q8 : q8) + 8) >> 4;
    return (unsigned)(q8 < 0 ? -magnitude : magnitude) & 15;
}

void kt_pack_int4_scalar(const uint8_t *rows, int64_t row_stride, int64_t columns, const float *reciprocal,
                         uint8_t *tiles, const kt_prefetch *prefetch) {
    (void)prefetch;
    for (int64_t r = 0; r < KT_HALF_ROWS; r++) {
        const uint8_t *row = rows + r * row_stride;
        for (int64_t first = 0; first < columns; first += 128) {
            uint8_t *tile = tiles + first / 128 * KT_TILE_BYTES;
            for (int64_t j = 0; j < 64; j++) {
                unsigned low = to_nibble(kt_to_int8(kt_load16(row + 2 * (first + j)), reciprocal[r]));
                unsigned high = to_nibble(kt_to_int8(kt_load16(row + 2 * (first + j + 64)), reciprocal[r]));
                tile[kt_half_byte_offset(r, j)] = (uint8_t)(high << 4 | low);
            }
        }
    }
}
