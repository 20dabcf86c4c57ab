/* The remainder of coarse int8 codes, AVX-512. Mostly only its energy is needed: 64 columns at a time. */
#include <immintrin.h>

#include "kernels.h"

KT_TARGET_AVX512 static int64_t energy(const int8_t *q, int64_t k) {
    __m512i sum = _mm512_setzero_si512();
    const __m512i ones = _mm512_set1_epi16(1);
    for (int64_t j = 0; j < k; j += 64) {
        __m512i magnitude = _mm512_abs_epi8(_mm512_loadu_si512(q + j));
        sum = _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(magnitude, magnitude), ones));
    }
    return _mm512_reduce_add_epi32(sum);
}

KT_TARGET_AVX512 float kt_remainder_avx512(const float *x, int64_t k, float scale, const int8_t *q, int8_t *q2,
                                           int32_t *sums) {
    float fine = scale * KT_REMAINDER_UNIT;
    if (!(fine > 0) || energy(q, k) >= KT_COARSE_ENERGY * k) return 0;
    const __m512 step = _mm512_set1_ps(scale), reciprocal = _mm512_set1_ps(1.0f / fine);
    for (int64_t first = 0; first < k; first += KT_K_BLOCK) {
        __m512i sum = _mm512_setzero_si512();
        for (int64_t j = first; j < k && j < first + KT_K_BLOCK; j += 16) {
            __m512 codes = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(q + j))));
            __m512 left = _mm512_fnmadd_ps(codes, step, _mm512_loadu_ps(x + j));
            __m512i codes2 = _mm512_cvtps_epi32(_mm512_mul_ps(left, reciprocal));
            _mm_storeu_si128((__m128i *)(q2 + j), _mm512_cvtepi32_epi8(codes2));
            sum = _mm512_add_epi32(sum, codes2);
        }
        sums[first / KT_K_BLOCK] = _mm512_reduce_add_epi32(sum);
    }
    return fine;
}
