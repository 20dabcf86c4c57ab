/* The upper bits of codes of 5 and 6 bits (ktq.h), in the vectors of a template. */
#ifndef KT_UPPER_BITS_H
#define KT_UPPER_BITS_H

/* The upper bits of the four lines of words number v: those of the first line begin at bit 4, the others follow. */
TARGET static inline ints upper_bits(int bits, const uint8_t *words, int v) {
    if (bits == 6) {
        ints two = loadu_si(words + v / 2 * 64);
        return v % 2 ? or_si(srli_epi16(two, 8), slli_epi16(two, 8)) : two;
    }
    ints all = loadu_si(words);
    return v == 0 ? all : v == 1 ? srli_epi16(all, 4) : v == 2 ? srli_epi16(all, 8) : slli_epi16(all, 4);
}

#endif
