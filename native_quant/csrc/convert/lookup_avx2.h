/* AVX2: 16 BF16 values that are looked up by codes of 4 bits, in their lower and upper bytes. */
#ifndef KT_LOOKUP_AVX2_H
#define KT_LOOKUP_AVX2_H

#include "vectors_avx2.h"

#include "bf16_template.h"

typedef struct {
    __m128i low, high;
} table16;

TARGET static inline table16 load_table(const floats *values) {
    __m128i a = narrow_epi32(to_bf16(values[0])), b = narrow_epi32(to_bf16(values[1])), byte = _mm_set1_epi16(0xff);
    table16 table = {_mm_packus_epi16(half_and(a, byte), half_and(b, byte)),
                     _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8))};
    return table;
}

/* 2 * LANES columns: the values of these codes, a byte each. */
TARGET static inline void look_up(table16 table, half_ints codes, uint16_t *out) {
    __m128i lower = _mm_shuffle_epi8(table.low, codes), upper = _mm_shuffle_epi8(table.high, codes);
    _mm_storeu_si128((__m128i *)out, _mm_unpacklo_epi8(lower, upper));
    _mm_storeu_si128((__m128i *)(out + 8), _mm_unpackhi_epi8(lower, upper));
}

/* 32 columns in 16 bytes: those of the lower halves, then those of the upper. */
TARGET static inline void look_up_halves(table16 table, const uint8_t *codes, uint16_t *out) {
    __m128i bytes = half_loadu(codes), nibble = _mm_set1_epi8(15);
    look_up(table, half_and(bytes, nibble), out);
    look_up(table, half_and(_mm_srli_epi16(bytes, 4), nibble), out + 16);
}

/* 32 columns in 16 bytes: even ones in the lower halves, odd ones in the upper. */
TARGET static inline void look_up_pairs(table16 table, const uint8_t *codes, uint16_t *out) {
    __m128i bytes = half_loadu(codes), nibble = _mm_set1_epi8(15);
    __m128i even = half_and(bytes, nibble), odd = half_and(_mm_srli_epi16(bytes, 4), nibble);
    look_up(table, _mm_unpacklo_epi8(even, odd), out);
    look_up(table, _mm_unpackhi_epi8(even, odd), out + 16);
}

#endif
