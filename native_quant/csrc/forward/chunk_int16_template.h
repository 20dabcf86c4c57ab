/* Codes of 4, 5, 6 and 8 bits to int16: a vector of words of 4 codes, and of their upper bits, at a time. */
#include "upper_bits.h"

/* Codes of 5 bits, or (code - 32) * scale of 6. */
__attribute__((always_inline)) TARGET static inline void
unpack_codes(int bits, const uint8_t *codes, const uint8_t *scales, int64_t columns, int16_t *chunk) {
    const ints lower = set1_epi16(15), upper = set1_epi16(bits == 6 ? 48 : 16);
    for (int64_t half = 0; half < 2 * (columns / KT_SUM_COLUMNS); half++, codes += 64 * bits, chunk += 512)
        for (int v = 0; v < 4; v++) {
            fetch(codes + KT_CHUNK_AHEAD + v * (16 * bits));
            for (int at = 0; at < 32; at += 2 * LANES) {
                ints low = loadu_si(codes + v * 64 + 2 * at), high = upper_bits(bits, codes + 256 + 2 * at, v);
                ints scale = setzero_si();
                if (bits == 6) { /* of a row, for both columns of a pair */
                    const uint8_t *rows = scales + (half / 2 * 2 + v / 2) * KT_PANEL_ROWS + half % 2 * KT_HALF_ROWS;
                    scale = load_epi8_epi32(rows + at / 2);
                    scale = odd_epi16(slli_epi32(scale, 16), scale);
                }
                const ints offset = slli_epi16(scale, 5);
                for (int g = 0; g < 4; g++) {
                    ints pairs = or_si(and_si(low, lower), and_si(high, upper));
                    if (bits == 6) pairs = sub_epi16(mullo_epi16(pairs, scale), offset);
                    storeu_si(chunk + (4 * v + g) * 32 + at, pairs);
                    low = srli_epi16(low, 4);
                    high = g == 1 ? srli_epi16(high, 12 - bits) : srli_epi16(high, bits - 4); /* the next byte */
                }
            }
        }
}

__attribute__((always_inline)) TARGET static inline void nibbles(int has_sign, const uint8_t *codes, int64_t columns,
                                                                 int16_t *chunk) {
    for (int64_t i = 0; i < columns * KT_PANEL_ROWS; i += 128) {
        fetch(codes + KT_CHUNK_AHEAD + i / 4);
        for (int at = 0; at < 32; at += 2 * LANES) {
            ints words = loadu_si(codes + i / 2 + 2 * at);
            for (int g = 0; g < 4; g++, words = srli_epi16(words, 4))
                storeu_si(chunk + i + g * 32 + at, has_sign ? srai_epi16(slli_epi16(words, 12), 12)
                                                            : and_si(words, set1_epi16(15)));
        }
    }
}

TARGET void KERNEL_OF(chunk_int16)(int bits, int has_sign, const uint8_t *codes, const uint8_t *scales,
                                   int64_t columns, int16_t *chunk) {
    if (bits == 4 && has_sign) nibbles(1, codes, columns, chunk);
    else if (bits == 4) nibbles(0, codes, columns, chunk);
    else if (bits == 5) unpack_codes(5, codes, NULL, columns, chunk);
    else if (bits == 6) unpack_codes(6, codes, scales, columns, chunk);
    else
        for (int64_t i = 0; i < columns * KT_PANEL_ROWS; i += 2 * LANES) {
            fetch(codes + KT_CHUNK_AHEAD + i / 2);
            storeu_si(chunk + i, load_epi8_epi16(codes + i));
        }
}
