/* A half tile, a vector of bytes of each of LANES rows at a time, transposed (pack_template.h). */
#include "pack_template.h"

/* A vector of codes; *worst becomes the largest of code + most, as a byte without sign: in range it is at most
   2 * most. */
TARGET static inline ints load_codes(const int8_t *codes, ints most, ints *worst) {
    ints loaded = loadu_si(codes);
    *worst = max_epu8(*worst, add_epi8(loaded, most));
    return loaded;
}

TARGET int KERNEL_OF(pack_codes)(int bits, const int8_t *rows, int64_t row_stride, int64_t columns, uint8_t *tiles,
                                 const kt_prefetch *prefetch) {
    const ints most = set1_epi8(kt_largest_code(bits)), low_nibble = set1_epi8(0x0f);
    int64_t tile_columns = kt_get_geometry(bits)->tile_columns;
    ints worst = setzero_si();
    for (int64_t c = 0; c < columns; c += tile_columns, tiles += KT_TILE_BYTES)
        for (int first = 0; first < KT_HALF_ROWS; first += LANES) {
            ints bytes[SIDES][LANES];
            for (int r = 0; r < LANES; r++) {
                const int8_t *row = rows + (first + r) * row_stride + c;
                for (int side = 0; side < SIDES; side++) {
                    ints low = load_codes(row + VECTOR_BYTES * side, most, &worst);
                    if (bits == 4) {
                        ints high = load_codes(row + VECTOR_BYTES * side + 64, most, &worst);
                        low = where_bits(low_nibble, low, slli_epi16(high, 4));
                    }
                    bytes[side][r] = low;
                }
                kt_prefetch_columns(prefetch, first + r, c, tile_columns);
            }
            for (int side = 0; side < SIDES; side++) kt_store_quads(bytes[side], 1, tiles + 4 * first + 512 * side);
        }
    return !any_gt_epu8(worst, add_epi8(most, most));
}
