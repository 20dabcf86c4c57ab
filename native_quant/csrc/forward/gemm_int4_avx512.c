/* Dot products with AMXINT4 weights, without VNNI: vpmaddubsw multiplies code + 8 (0..15) by the activation. What it
 * gives, two products, is at most 2 * 15 * 127 = 3810, so the eight of 4 quads are added as int16; then they go to the
 * int32 in memory. */
#include <string.h>

#include "gemm_avx512.h"

#define TARGET KT_TARGET_AVX512
enum { BITS = 4, OFFSET = 8 };

/* (bytes & 15) ^ 8: a flipped sign bit adds 8. */
TARGET static inline __m512i low_codes(__m512i bytes) {
    return _mm512_ternarylogic_epi32(bytes, _mm512_set1_epi8(15), _mm512_set1_epi8(8), 0x6a);
}
TARGET static inline __m512i high_codes(__m512i bytes) {
    return low_codes(_mm512_srli_epi16(bytes, 4));
}
TARGET static inline __m512i multiply(__m512i sum, __m512i codes, const int8_t *a) {
    int32_t four;
    memcpy(&four, a, sizeof four);
    return _mm512_add_epi16(sum, _mm512_maddubs_epi16(codes, _mm512_set1_epi32(four)));
}
TARGET static inline __m512i load(const int32_t *c) {
    (void)c;
    return _mm512_setzero_si512();
}
TARGET static inline __m512i rest(__m512i sum, int32_t *c) {
    _mm512_store_si512(c, _mm512_add_epi32(_mm512_load_si512(c), _mm512_madd_epi16(sum, _mm512_set1_epi16(1))));
    return _mm512_setzero_si512();
}
TARGET static inline void store(int32_t *c, __m512i sum) {
    (void)c, (void)sum;
}

#include "gemm_avx512_kernel.h"

int kt_gemm_int4_avx512(const kt_gemm *job) {
    return gemm(job);
}
