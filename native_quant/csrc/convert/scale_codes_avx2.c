/* AVX2: 16 values at a time. */
#include <immintrin.h>

#include "kernels.h"

/* 8 codes without their signs, in 32-bit lanes. */
KT_TARGET_AVX2 static inline __m256i codes_of(const float *units, __m256 ratio, __m256 most) {
    __m256 q = _mm256_min_ps(_mm256_fmadd_ps(_mm256_load_ps(units), ratio, _mm256_set1_ps(KT_ROUND)), most);
    return _mm256_and_si256(_mm256_castps_si256(q), _mm256_set1_epi32(0xff)); /* the low bits are the integer */
}

KT_TARGET_AVX2 void kt_scale_codes_avx2(const kt_scale_search *search, float ratio, int8_t *codes) {
    const __m256 scale = _mm256_set1_ps(ratio), most = _mm256_set1_ps(search->largest + KT_ROUND);
    for (int64_t c = 0; c < search->k; c += 16) {
        __m256i words = _mm256_packus_epi32(codes_of(search->units + c, scale, most),
                                            codes_of(search->units + c + 8, scale, most));
        words = _mm256_permute4x64_epi64(words, 0xd8);
        /* 1, or -1 where the sign bit is set */
        __m256i x = _mm256_loadu_si256((const __m256i *)(search->row + 2 * c));
        words = _mm256_sign_epi16(words, _mm256_or_si256(_mm256_srai_epi16(x, 15), _mm256_set1_epi16(1)));
        __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        _mm_storeu_si128((__m128i *)(codes + c), bytes);
    }
}
