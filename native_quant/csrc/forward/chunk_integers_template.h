/* Codes of 5, 6 and 8 bits to BF16: a vector of words of 4 codes, and of their upper bits, at a time. A file that
 * includes this must define `table`, table_of, which makes one for a number of bits, and values_of: what the lowest
 * bits of words stand for, whatever is above them. */
#include "upper_bits.h"

/* x * scale rounded to BF16, for integers whose product is below 2^13: `far` is 65537 * scale, so that 16 of 24 bits of
   the product are rounded off with it, and what is left of them is subtracted. */
TARGET static inline ints rounded_product(floats x, floats scale, floats far) {
    floats y = mul_ps(x, far);
    return castps_si(sub_ps(y, fnmadd_ps(x, scale, y)));
}

/* Pairs of columns times the scale of their row. */
TARGET static inline ints scaled(ints pairs, floats scale, floats far) {
    const ints above = set1_epi32(0xffff0000);
    ints first = rounded_product(castsi_ps(slli_epi32(pairs, 16)), scale, far);
    ints second = rounded_product(castsi_ps(and_si(pairs, above)), scale, far);
    return or_si(second, srli_epi32(first, 16));
}

__attribute__((always_inline)) TARGET static inline void
chunk_of(int bits, int is_scaled, const uint8_t *codes, const uint16_t *scales, int64_t columns, uint16_t *chunk) {
    const table of = table_of(bits);
    for (int64_t half = 0; half < 2 * (columns / KT_SUM_COLUMNS); half++, codes += 64 * bits, chunk += 512)
        for (int v = 0; v < 4; v++) {
            fetch(codes + KT_CHUNK_AHEAD + v * (16 * bits));
            for (int at = 0; at < 32; at += 2 * LANES) {
                ints low = loadu_si(codes + v * 64 + 2 * at), high = upper_bits(bits, codes + 256 + 2 * at, v);
                floats scale = setzero_ps(), far = setzero_ps();
                if (is_scaled) {
                    const uint16_t *of_rows = scales + (half / 2 * 2 + v / 2) * KT_PANEL_ROWS + half % 2 * KT_HALF_ROWS;
                    scale = castsi_ps(slli_epi32(load_epu16_epi32(of_rows + at / 2), 16));
                    far = mul_ps(scale, set1_ps(65537));
                }
                for (int g = 0; g < 4; g++) {
                    ints pairs = values_of(of, where_bits(set1_epi16(15), low, high));
                    if (is_scaled) pairs = scaled(pairs, scale, far);
                    storeu_si(chunk + (4 * v + g) * 32 + at, pairs);
                    low = srli_epi16(low, 4);
                    high = bits == 6 ? srli_epi16(high, 2) : srli_epi16(high, 1);
                }
            }
        }
}

TARGET void KERNEL_OF(chunk_integers)(int bits, const uint8_t *codes, const uint16_t *scales, int64_t columns,
                                      uint16_t *chunk) {
    if (bits == 5) chunk_of(5, 0, codes, NULL, columns, chunk);
    else if (bits == 6) chunk_of(6, 1, codes, scales, columns, chunk);
    else
        for (int64_t i = 0; i < columns * KT_PANEL_ROWS; i += LANES) {
            fetch(codes + KT_CHUNK_AHEAD + i / 2);
            floats x = cvtepi32_ps(load_epi8_epi32(codes + i));
            store_epi32_epi16(chunk + i, srli_epi32(castps_si(x), 16));
        }
}
