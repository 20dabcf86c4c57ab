/* The upper bits of codes of 5 and 6 bits (ktq.h), in the vectors of a template. */
#ifndef KT_UPPER_BITS_H
#define KT_UPPER_BITS_H

/* The bits above the lowest 4 of the codes of line v: those of low nibbles begin at bit 4 of each byte, those of high
   nibbles follow. */
TARGET static inline ints upper_bits(int bits, const uint8_t *lines, int v) {
    if (bits == 6) {
        ints two = loadu_si(lines + v / 2 * 64);
        return v % 2 ? slli_epi16(two, 4) : two;
    }
    ints all = loadu_si(lines);
    return v == 0 ? all : v == 1 ? srli_epi16(all, 2) : v == 2 ? slli_epi16(all, 4) : slli_epi16(all, 2);
}

#endif
