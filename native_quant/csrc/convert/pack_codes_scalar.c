/* A half tile of codes: 16 rows x 64 bytes; AMXINT4: the byte of column j holds j (low nibble) and j + 64 (high). */
#include "kernels.h"

int kt_pack_codes_scalar(int bits, const int8_t *rows, int64_t row_stride, int64_t columns, uint8_t *tiles,
                         const kt_prefetch *prefetch) {
    (void)prefetch;
    int64_t tile_columns = kt_get_geometry(bits)->tile_columns;
    int largest = kt_largest_code(bits), good = 1;
    for (int64_t r = 0; r < KT_HALF_ROWS; r++)
        for (int64_t c = 0; c < columns; c++) {
            int code = rows[r * row_stride + c], nibble = code & 15;
            good &= code >= -largest && code <= largest;
            int64_t j = c % tile_columns;
            uint8_t *byte = tiles + c / tile_columns * KT_TILE_BYTES + kt_half_byte_offset(r, j % 64);
            if (bits == 8) *byte = (uint8_t)code;
            else *byte = (uint8_t)(j < 64 ? nibble : *byte | nibble << 4);
        }
    return good;
}
