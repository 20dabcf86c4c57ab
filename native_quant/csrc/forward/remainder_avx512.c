/* The remainder of coarse int8 codes, AVX-512: 16 columns at a time. */
#include <immintrin.h>

#include "kernels.h"

KT_TARGET_AVX512 void kt_remainder_avx512(const float *x, int64_t k, float scale, float step, kt_code_row q,
                                          int8_t *q2, int32_t *sums) {
    const __m512 coarse = _mm512_set1_ps(scale), reciprocal = _mm512_set1_ps(1.0f / step);
    for (int64_t first = 0; first < k; first += KT_K_BLOCK) {
        __m512i sum = _mm512_setzero_si512();
        for (int64_t j = first; j < k && j < first + KT_K_BLOCK; j += 16) {
            int64_t at = j / 64 * q.pitch + j % 64;
            __m512 codes = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(q.q + at))));
            __m512 left = _mm512_fnmadd_ps(codes, coarse, _mm512_loadu_ps(x + j));
            __m512i codes2 = _mm512_cvtps_epi32(_mm512_mul_ps(left, reciprocal));
            _mm_storeu_si128((__m128i *)(q2 + at), _mm512_cvtepi32_epi8(codes2));
            sum = _mm512_add_epi32(sum, codes2);
        }
        sums[first / KT_K_BLOCK] = _mm512_reduce_add_epi32(sum);
    }
}
