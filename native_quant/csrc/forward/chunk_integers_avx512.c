/* Codes of 5, 6 and 8 bits to BF16, AVX-512: a vector of words of 4 codes, and of their upper bits, at a time. */
#include "vectors_avx512.h"

#include "bf16_template.h"
#include "upper_bits.h"

/* vpermi2w takes 6 bits of a word; of 5 bits, the values stand there twice. */
typedef struct {
    ints low, high;
} table;

TARGET static inline table load_table(int bits) {
    static const uint8_t codes[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                      16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
    ints first = load_epu8_epi16(codes), second = bits == 6 ? add_epi16(first, set1_epi16(32)) : first;
    floats offset = set1_ps(bits == 6 ? 128 + 32 : 128);
    return (table){codes_to_bf16(first, offset), codes_to_bf16(second, offset)};
}

/* What the lowest bits of words stand for, whatever is above them. */
TARGET static inline ints look_up_values(table values, ints words) {
    return _mm512_permutex2var_epi16(values.low, words, values.high);
}

/* x * scale rounded to BF16, for integers whose product is below 2^13: `far` is 65537 * scale, so that 16 of 24 bits of
   the product are rounded off with it, and their remainder is subtracted. */
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
unpack_codes(int bits, int is_scaled, const uint8_t *codes, const uint16_t *scales, int64_t columns, uint16_t *chunk) {
    const table values = load_table(bits);
    for (int64_t half = 0; half < 2 * (columns / KT_SUM_COLUMNS); half++, codes += 64 * bits, chunk += 512)
        for (int v = 0; v < 4; v++) {
            fetch(codes + KT_CHUNK_AHEAD + v * (16 * bits));
            for (int at = 0; at < 32; at += 2 * LANES) {
                ints low = loadu_si(codes + v * 64 + 2 * at), high = upper_bits(bits, codes + 256 + 2 * at, v);
                floats scale = setzero_ps(), far = setzero_ps();
                if (is_scaled) {
                    const uint16_t *row_scales =
                        scales + (half / 2 * 2 + v / 2) * KT_PANEL_ROWS + half % 2 * KT_HALF_ROWS;
                    scale = castsi_ps(slli_epi32(load_epu16_epi32(row_scales + at / 2), 16));
                    far = mul_ps(scale, set1_ps(65537));
                }
                for (int g = 0; g < 4; g++) {
                    ints pairs = look_up_values(values, where_bits(set1_epi16(15), low, high));
                    if (is_scaled) pairs = scaled(pairs, scale, far);
                    storeu_si(chunk + (4 * v + g) * 32 + at, pairs);
                    low = srli_epi16(low, 4);
                    high = g == 1 ? srli_epi16(high, 12 - bits) : srli_epi16(high, bits - 4); /* the next byte */
                }
            }
        }
}

TARGET void KERNEL_OF(chunk_integers)(int bits, const uint8_t *codes, const uint16_t *scales, int64_t columns,
                                      uint16_t *chunk) {
    if (bits == 5) unpack_codes(5, 0, codes, NULL, columns, chunk);
    else if (bits == 6) unpack_codes(6, 1, codes, scales, columns, chunk);
    else
        for (int64_t i = 0; i < columns * KT_PANEL_ROWS; i += LANES) {
            fetch(codes + KT_CHUNK_AHEAD + i / 2);
            floats x = cvtepi32_ps(load_epi8_epi32(codes + i));
            store_epi32_epi16(chunk + i, srli_epi32(castps_si(x), 16));
        }
}
