/* Codes of 5, 6 and 8 bits to BF16: a vector of words of 4 codes, and of their upper bits, at a time. A file that
 * includes this must define `table`, table_of, which makes one for a number of bits, and values_of: what the lowest
 * bits of words stand for, whatever is above them. */

/* The upper bits of the four lines of words number v, the first line's from bit 4 on. */
TARGET static inline ints upper_bits(int bits, const uint8_t *words, int v) {
    if (bits == 6) {
        ints two = loadu_si(words + v / 2 * 64);
        return v % 2 ? or_si(srli_epi16(two, 8), slli_epi16(two, 8)) : two;
    }
    ints all = loadu_si(words);
    return v == 0 ? all : v == 1 ? srli_epi16(all, 4) : v == 2 ? srli_epi16(all, 8) : slli_epi16(all, 4);
}

__attribute__((always_inline)) TARGET static inline void chunk_of(int bits, const uint8_t *codes, int64_t columns,
                                                                  uint16_t *chunk) {
    const table of = table_of(bits);
    for (int64_t i = 0; i < columns * KT_PANEL_ROWS; i += 512, codes += 64 * bits)
        for (int v = 0; v < 4; v++) {
            fetch(codes + KT_CHUNK_AHEAD + v * (16 * bits));
            for (int at = 0; at < 32; at += 2 * LANES) {
                ints low = loadu_si(codes + v * 64 + 2 * at), high = upper_bits(bits, codes + 256 + 2 * at, v);
                for (int g = 0; g < 4; g++) {
                    storeu_si(chunk + i + (4 * v + g) * 32 + at, values_of(of, where_bits(set1_epi16(15), low, high)));
                    low = srli_epi16(low, 4);
                    high = bits == 6 ? srli_epi16(high, 2) : srli_epi16(high, 1);
                }
            }
        }
}

TARGET void KERNEL_OF(chunk_integers)(int bits, const uint8_t *codes, int64_t columns, uint16_t *chunk) {
    if (bits == 5) chunk_of(5, codes, columns, chunk);
    else if (bits == 6) chunk_of(6, codes, columns, chunk);
    else
        for (int64_t i = 0; i < columns * KT_PANEL_ROWS; i += LANES) {
            fetch(codes + KT_CHUNK_AHEAD + i / 2);
            floats x = cvtepi32_ps(load_epi8_epi32(codes + i));
            store_epi32_epi16(chunk + i, srli_epi32(castps_si(x), 16));
        }
}
