/* FP8 E4M3 to BF16 with AVX-512 VBMI: tables have the lower and the upper byte of each magnitude, also of subnormals, 0
 * and NaN. Include vectors_avx512.h before this, and define TARGET with VBMI. */
#ifndef KT_FP8_TO_BF16_AVX512BF16_H
#define KT_FP8_TO_BF16_AVX512BF16_H

#include "bf16.h"

/* Magnitudes below 8 are m * 2^-9; 127 is NaN. */
#define SUBNORMAL(m) ((m) > 3 ? 0x3b80 + 32 * (m) : (m) > 1 ? 0x3b00 + 64 * (m) : 0x3b00 * (m))
#define MAGNITUDE(m) ((m) > 126 ? KT_BF16_NAN : (m) > 7 ? 0x3c00 + 16 * (m) : SUBNORMAL(m))
#define LOWER(m) MAGNITUDE(m) & 255
#define UPPER(m) MAGNITUDE(m) >> 8
#define FOUR(X, m) X(m), X(m + 1), X(m + 2), X(m + 3)
#define SIXTEEN(X, m) FOUR(X, m), FOUR(X, m + 4), FOUR(X, m + 8), FOUR(X, m + 12)
#define SIXTY_FOUR(X, m) {SIXTEEN(X, m), SIXTEEN(X, m + 16), SIXTEEN(X, m + 32), SIXTEEN(X, m + 48)}
static const _Alignas(64) uint8_t kt_lower_bytes[2][64] = {SIXTY_FOUR(LOWER, 0), SIXTY_FOUR(LOWER, 64)};
static const _Alignas(64) uint8_t kt_upper_bytes[2][64] = {SIXTY_FOUR(UPPER, 0), SIXTY_FOUR(UPPER, 64)};
#undef SUBNORMAL
#undef MAGNITUDE
#undef LOWER
#undef UPPER
#undef FOUR
#undef SIXTEEN
#undef SIXTY_FOUR

/* Looks up the lower 7 bits of each byte. */
TARGET static inline ints look_up_bytes(const uint8_t (*table)[64], ints codes) {
    return _mm512_permutex2var_epi8(load_si(table[0]), codes, load_si(table[1]));
}

/* Decodes 64 codes to two vectors. */
TARGET static inline void fp8_to_bf16(const uint8_t *codes, ints *out) {
    const ints code = before_unpack(loadu_si(codes));
    const ints lower = look_up_bytes(kt_lower_bytes, code), magnitude = look_up_bytes(kt_upper_bytes, code);
    const ints upper = where_bits(set1_epi8(0x80), code, magnitude);
    out[0] = unpacklo_epi8(lower, upper);
    out[1] = unpackhi_epi8(lower, upper);
}

#endif
