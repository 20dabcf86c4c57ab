/* FP8 E4M3 to BF16, a vector of codes at a time: sign, exponent and fraction as they are, another bias. Codes for which
 * that is wrong (subnormals, 0 and NaN) are rare. Include a header of vectors before this. */
#ifndef KT_FP8_TO_BF16_H
#define KT_FP8_TO_BF16_H

#include "bf16.h"

/* The values of codes with their sign extended, */
TARGET static inline ints normal_to_bf16(ints code) {
    ints fields = and_si(slli_epi16(code, 4), set1_epi16(0x87f0));
    return add_epi16(fields, set1_epi16(0x3c00));
}

/* and where some are not normal: m * 2^-9, the upper and the lower byte, or NaN. Where shuffle_epi8's index is 0, so is
   what it finds. */
TARGET static inline ints any_to_bf16(ints code, ints normal) {
    static const uint8_t lower[16] = {0, 0, 0x80, 0xc0, 0, 0x20, 0x40, 0x60};
    static const uint8_t upper[16] = {0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c};
    const ints fraction = and_si(code, set1_epi16(7)), above = slli_epi16(fraction, 8);
    const ints sign = and_si(code, set1_epi16(0x8000)), magnitude = and_si(code, set1_epi16(0x7f));
    ints value = or_si(shuffle_epi8(load_repeated(lower), fraction), shuffle_epi8(load_repeated(upper), above));
    value = where_epi16(eq_epi16(and_si(code, set1_epi16(0x78)), setzero_si()), or_si(value, sign), normal);
    return where_epi16(eq_epi16(magnitude, set1_epi16(0x7f)), or_si(sign, set1_epi16(KT_BF16_NAN)), value);
}

/* Decodes VECTOR_BYTES codes to two vectors. Magnitudes of normal numbers are 8 .. 126. */
TARGET static inline void fp8_to_bf16(const uint8_t *codes, ints *out) {
    const ints magnitude = and_si(loadu_si(codes), set1_epi8(0x7f));
    const ints first = load_epi8_epi16(codes), second = load_epi8_epi16(codes + VECTOR_BYTES / 2);
    out[0] = normal_to_bf16(first);
    out[1] = normal_to_bf16(second);
    if (__builtin_expect(any_gt_epu8(sub_epi8(magnitude, set1_epi8(8)), set1_epi8(118)), 0)) {
        out[0] = any_to_bf16(first, out[0]);
        out[1] = any_to_bf16(second, out[1]);
    }
}

#endif
