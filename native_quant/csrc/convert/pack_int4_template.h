/* A half tile of AMXINT4, a vector of pairs of codes of each of LANES rows at a time, transposed (pack_template.h). The
 * caller guarantees that no x * reciprocal leaves -112..112, and that subnormal values do not matter in these rows. */
#include "pack_template.h"

/* From the INT8 grid to multiples of 16, half away from zero: floor((q + 8) / 16) for q >= 0 and floor((q + 7) / 16)
   below, so the code is the upper nibble of this. */
TARGET static inline ints upper_nibbles(ints q8) {
    return less_if_negative_epi8(add_epi8(q8, set1_epi8(8)), q8);
}

/* A vector of codes: of these columns in the lower nibbles, of those 64 further on in the upper ones. */
TARGET static inline ints nibble_pairs(const uint8_t *bf16, floats reciprocal) {
    ints low = upper_nibbles(kt_int8_codes(bf16, reciprocal)), high = upper_nibbles(kt_int8_codes(bf16 + 128, reciprocal));
    return where_bits(set1_epi8(0x0f), srli_epi16(low, 4), high);
}

TARGET void KERNEL_OF(pack_int4)(const uint8_t *rows, int64_t row_stride, int64_t columns, const float *reciprocal,
                                 uint8_t *tiles, const kt_ahead *ahead) {
    for (int64_t c = 0; c < columns; c += 128, tiles += KT_TILE_BYTES)
        for (int first = 0; first < KT_HALF_ROWS; first += LANES) {
            ints codes[SIDES][LANES];
            for (int r = 0; r < LANES; r++) {
                const uint8_t *row = rows + (first + r) * row_stride + 2 * c;
                floats factor = set1_ps(reciprocal[first + r]);
                for (int side = 0; side < SIDES; side++)
                    codes[side][r] = nibble_pairs(row + 2 * VECTOR_BYTES * side, factor);
                kt_fetch(ahead, first + r, c, 128);
            }
            for (int side = 0; side < SIDES; side++) kt_store_quads(codes[side], 0, tiles + 4 * first + 512 * side);
        }
}
