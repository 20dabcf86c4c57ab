/* AVX-512: 16 BF16 values that are looked up by codes of 4 bits. */
#ifndef KT_LOOKUP_AVX512_H
#define KT_LOOKUP_AVX512_H

#include "vectors_avx512.h"

#include "bf16_template.h"

typedef __m512i table16;

TARGET static inline table16 load_table(const floats *values) {
    return _mm512_castsi256_si512(narrow_epi32(to_bf16(*values)));
}

/* 2 * LANES columns: the values of these codes, a byte each. */
TARGET static inline void look_up(table16 table, half_ints codes, uint16_t *out) {
    storeu_si(out, _mm512_permutexvar_epi16(_mm512_cvtepu8_epi16(codes), table));
}

/* 32 columns in 16 bytes: those of the lower halves, then those of the upper. */
TARGET static inline void look_up_halves(table16 table, const uint8_t *codes, uint16_t *out) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)codes);
    __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(bytes), _mm_srli_epi16(bytes, 4), 1);
    look_up(table, half_and(both, half_set1_epi8(15)), out);
}

/* 32 columns in 16 bytes: even ones in the lower halves, odd ones in the upper. */
TARGET static inline void look_up_pairs(table16 table, const uint8_t *codes, uint16_t *out) {
    /* A byte goes to 32 bits, its lower half to their lower half and its upper half to their upper half. */
    ints pairs = load_epu8_epi32(codes);
    ints index = and_si(or_si(pairs, slli_epi32(pairs, 12)), set1_epi16(15));
    storeu_si(out, _mm512_permutexvar_epi16(index, table));
}

#endif
