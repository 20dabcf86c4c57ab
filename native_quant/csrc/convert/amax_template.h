/* The sign is taken off, and four chains of maxima hide their latency. The caller guarantees that k is a multiple of
 * 64. A maximum may count a value twice: the first and last two vectors are taken as they lie, and what is between (or
 * a little of them again) from boundaries of vectors, since tensors rarely begin on one. */

TARGET static inline ints magnitude(const uint8_t *p) {
    return and_si(loadu_si(p), set1_epi16(0x7fff));
}

TARGET uint16_t KERNEL_OF(amax)(const uint8_t *row, int64_t k) {
    enum { V = VECTOR_BYTES };
    const uint8_t *end = row + 2 * k;
    ints a = magnitude(row), b = magnitude(row + V), c = magnitude(end - 2 * V), d = magnitude(end - V);
    /* values at odd addresses stay where they are */
    const uint8_t *p = (uintptr_t)row & 1 ? row : row + (-(uintptr_t)row & (V - 1));
    for (; p + 4 * V <= end; p += 4 * V) {
        a = max_epu16(a, magnitude(p));
        b = max_epu16(b, magnitude(p + V));
        c = max_epu16(c, magnitude(p + 2 * V));
        d = max_epu16(d, magnitude(p + 3 * V));
    }
    for (; p + V <= end; p += V) a = max_epu16(a, magnitude(p));
    return reduce_max_epu16(max_epu16(max_epu16(a, b), max_epu16(c, d)));
}
