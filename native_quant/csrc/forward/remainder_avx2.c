/* The remainder of coarse int8 codes, AVX2: 8 columns at a time. */
#include <immintrin.h>

#include "kernels.h"

KT_TARGET_AVX2 static int32_t total(__m256i v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

KT_TARGET_AVX2 void kt_remainder_avx2(const float *x, int64_t k, float scale, float step, kt_code_row q, int8_t *q2,
                                      int32_t *sums) {
    const __m256 coarse = _mm256_set1_ps(scale), reciprocal = _mm256_set1_ps(1.0f / step);
    for (int64_t first = 0; first < k; first += KT_K_BLOCK) {
        __m256i sum = _mm256_setzero_si256();
        for (int64_t j = first; j < k && j < first + KT_K_BLOCK; j += 8) {
            int64_t at = j / 64 * q.pitch + j % 64;
            __m256 codes = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(q.q + at))));
            __m256 left = _mm256_fnmadd_ps(codes, coarse, _mm256_loadu_ps(x + j));
            __m256i codes2 = _mm256_cvtps_epi32(_mm256_mul_ps(left, reciprocal));
            __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(codes2), _mm256_extracti128_si256(codes2, 1));
            _mm_storel_epi64((__m128i *)(q2 + at), _mm_packs_epi16(narrow, narrow));
            sum = _mm256_add_epi32(sum, codes2);
        }
        sums[first / KT_K_BLOCK] = total(sum);
    }
}
