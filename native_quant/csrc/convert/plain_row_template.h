/* A row in the plain order of MOE_INT8 and MOE_INT4, a vector of columns at a time. */
#include <math.h>

#include "bf16_template.h"

/* Halves away from 0: adding the largest number below 0.5, and cutting off. At 0.5 itself the sum rounds up to 1. */
TARGET static inline ints round_quotients(floats x, floats step) {
    const ints sign = set1_epi32(0x80000000), half = castps_si(set1_ps(0x1.fffffep-2f));
    floats q = div_ps(x, step);
    return cvttps_epi32(add_ps(q, castsi_ps(or_si(and_si(castps_si(q), sign), half))));
}

/* The codes of a vector of BF16 values, 16 bits each, in their order. */
TARGET static inline ints plain_codes(const uint8_t *values, floats step) {
    ints x = loadu_si(values);
    ints even = round_quotients(castsi_ps(slli_epi32(x, 16)), step), odd = round_quotients(upper_half(x), step);
    return odd_epi16(slli_epi32(odd, 16), even);
}

TARGET void KERNEL_OF(plain_row)(int bits, const uint8_t *row, int64_t k, float step, uint8_t *codes) {
    /* An infinite step makes every code 0, as a step of 0 is to do. */
    const floats divisor = set1_ps(step != 0.0f ? step : INFINITY);
    const ints low = set1_epi16(15);
    for (int64_t c = 0; c < k; c += KT_PLAIN_BYTES * 8 / bits, codes += KT_PLAIN_ROWS * KT_PLAIN_BYTES)
        for (int64_t i = 0; i < KT_PLAIN_BYTES; i += VECTOR_BYTES / 2) {
            ints words = plain_codes(row + 2 * (c + i), divisor);
            if (bits == 4) {
                ints second = plain_codes(row + 2 * (c + KT_PLAIN_BYTES + i), divisor);
                words = or_si(slli_epi16(words, 4), and_si(second, low));
            }
            store_epi16_epi8(codes + i, words);
        }
}
