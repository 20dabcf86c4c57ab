/* The sign is taken off, and four chains of maxima hide their latency. The caller guarantees that k is a multiple of
 * 64. A maximum may count a value twice: the first and last two vectors are read unaligned, and what is between (or
 * a little of them again) from boundaries of vectors, since tensors rarely begin on one. */
#include "bf16_template.h"

TARGET uint16_t KERNEL_OF(amax)(const uint8_t *row, int64_t k) {
    enum { V = VECTOR_BYTES };
    const uint8_t *end = row + 2 * k;
    ints a = bf16_magnitudes(row), b = bf16_magnitudes(row + V);
    ints c = bf16_magnitudes(end - 2 * V), d = bf16_magnitudes(end - V);
    /* values at odd addresses stay where they are */
    const uint8_t *p = (uintptr_t)row & 1 ? row : row + (-(uintptr_t)row & (V - 1));
    for (; p + 4 * V <= end; p += 4 * V) {
        a = max_epu16(a, bf16_magnitudes(p));
        b = max_epu16(b, bf16_magnitudes(p + V));
        c = max_epu16(c, bf16_magnitudes(p + 2 * V));
        d = max_epu16(d, bf16_magnitudes(p + 3 * V));
    }
    for (; p + V <= end; p += V) a = max_epu16(a, bf16_magnitudes(p));
    return reduce_max_epu16(max_epu16(max_epu16(a, b), max_epu16(c, d)));
}
