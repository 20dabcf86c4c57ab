/* Dot products with AMXINT8 weights, without VNNI: vpmaddubsw multiplies |code| by the activation with the sign of the
 * code. Two products are at most 2 * 128 * 127 = 32512 and fit into its int16; vpmaddwd with ones adds these in pairs.
 * Widening both to int16 for vpmaddwd takes as many instructions, and twice the bytes. */
#include <string.h>

#include "gemm_avx512.h"

#define TARGET KT_TARGET_AVX512
enum { BITS = 8, OFFSET = 0 };

TARGET static inline __m512i low_codes(__m512i bytes) {
    return bytes;
}
TARGET static inline __m512i high_codes(__m512i bytes) {
    return bytes;
}
TARGET static inline __m512i multiply(__m512i sum, __m512i codes, const int8_t *a) {
    int32_t four;
    memcpy(&four, a, sizeof four);
    __m512i x = _mm512_set1_epi32(four), ones = _mm512_set1_epi16(1);
    x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(codes), _mm512_setzero_si512(), x);
    return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(_mm512_abs_epi8(codes), x), ones));
}

#include "gemm_avx512_sums.h"

#include "gemm_avx512_kernel.h"

int kt_gemm_int8_avx512(const kt_gemm *job) {
    return gemm(job);
}
