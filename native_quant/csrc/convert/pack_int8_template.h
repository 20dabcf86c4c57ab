/* A half tile of AMXINT8, a vector of codes of each of LANES rows at a time, transposed (pack_template.h). The caller
 * guarantees that no x * reciprocal leaves -127..127, and that subnormal values do not matter in these rows. */
#include "pack_template.h"

TARGET void KERNEL_OF(pack_int8)(const uint8_t *rows, int64_t row_stride, int64_t columns, const float *reciprocal,
                                 uint8_t *tiles, const kt_ahead *ahead) {
    for (int64_t c = 0; c < columns; c += 64, tiles += KT_TILE_BYTES)
        for (int first = 0; first < KT_HALF_ROWS; first += LANES) {
            ints codes[SIDES][LANES];
            for (int r = 0; r < LANES; r++) {
                const uint8_t *row = rows + (first + r) * row_stride + 2 * c;
                floats factor = set1_ps(reciprocal[first + r]);
                for (int side = 0; side < SIDES; side++)
                    codes[side][r] = kt_int8_codes(row + 2 * VECTOR_BYTES * side, factor);
                kt_fetch(ahead, first + r, c, 64);
            }
            for (int side = 0; side < SIDES; side++) kt_store_quads(codes[side], 0, tiles + 4 * first + 512 * side);
        }
}
