/* AVX2: float32 to BF16, and 16 BF16 values that are looked up. */
#ifndef KT_BF16_AVX2_H
#define KT_BF16_AVX2_H

#include <immintrin.h>
#include <stdint.h>

#include "isa.h"

/* Float32 to BF16 bits (kt_to_bf16), one in each 32-bit lane; not for NaN. */
KT_TARGET_AVX2 static inline __m256i to_bf16(__m256 x) {
    __m256i u = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
}

/* 32-bit lanes to 16-bit ones, in order. */
KT_TARGET_AVX2 static inline __m128i narrow(__m256i u) {
    return _mm_packus_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1));
}

/* 16 values by their lower and upper bytes. */
typedef struct {
    __m128i low, high;
} table16;

KT_TARGET_AVX2 static inline table16 table_of(__m256 first, __m256 second) {
    __m128i a = narrow(to_bf16(first)), b = narrow(to_bf16(second)), byte = _mm_set1_epi16(0xff);
    table16 table = {_mm_packus_epi16(_mm_and_si128(a, byte), _mm_and_si128(b, byte)),
                     _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8))};
    return table;
}

/* 16 columns: the values of these indices. */
KT_TARGET_AVX2 static inline void look_up(table16 table, __m128i index, uint16_t *out) {
    __m128i lower = _mm_shuffle_epi8(table.low, index), upper = _mm_shuffle_epi8(table.high, index);
    _mm_storeu_si128((__m128i *)out, _mm_unpacklo_epi8(lower, upper));
    _mm_storeu_si128((__m128i *)(out + 8), _mm_unpackhi_epi8(lower, upper));
}

#endif
