/* A half tile of AMXINT4 (pack_template.h). The caller guarantees that no x * reciprocal leaves -112..112, and that
 * subnormal values do not matter in these rows. */
#include "pack_template.h"

/* From the INT8 grid to multiples of 16, half away from zero: floor((q + 8) / 16) for q >= 0 and floor((q + 7) / 16)
   below, so the code is the upper nibble of this. */
TARGET static inline ints upper_nibbles(ints q8) {
    return less_if_negative_epi8(add_epi8(q8, set1_epi8(8)), q8);
}

/* A vector of codes: of these columns in the lower nibbles, of those 64 further on in the upper ones. */
TARGET static inline ints nibble_pairs(const uint8_t *bf16, floats reciprocal) {
    ints low = upper_nibbles(kt_int8_codes(bf16, reciprocal));
    ints high = upper_nibbles(kt_int8_codes(bf16 + 128, reciprocal));
    return where_bits(set1_epi8(0x0f), srli_epi16(low, 4), high);
}

TARGET void KERNEL_OF(pack_int4)(const uint8_t *rows, int64_t row_stride, int64_t columns, const float *reciprocal,
                                 uint8_t *tiles, const kt_prefetch *prefetch) {
    kt_pack_tiles(4, nibble_pairs, rows, row_stride, columns, reciprocal, tiles, prefetch);
}
