/* AVX2: 32 values at a time, the even and the odd ones as float32; joined again they are two bytes in each word of 32
 * bits. */
#include <immintrin.h>

#include "e4m3.h"

/* kt_e4m3_magnitude of x / scale in each lane, and KT_E4M3_LEAST >> 20 more. */
KT_TARGET_AVX2 static inline __m256i magnitudes(__m256i x, __m256 scale) {
    __m256 y = _mm256_div_ps(_mm256_castsi256_ps(x), scale);
    __m256i power = _mm256_and_si256(_mm256_castps_si256(y), _mm256_set1_epi32(KT_E4M3_EXPONENT));
    power = _mm256_max_epi32(power, _mm256_set1_epi32(KT_E4M3_LEAST));
    __m256i up = _mm256_add_epi32(power, _mm256_set1_epi32(KT_E4M3_UP));
    __m256i sum = _mm256_castps_si256(_mm256_add_ps(y, _mm256_castsi256_ps(up)));
    return _mm256_add_epi32(_mm256_srli_epi32(power, 20), _mm256_sub_epi32(sum, up));
}

/* 16 values: two codes in the lower half of each word. */
KT_TARGET_AVX2 static inline __m256i pairs(const uint8_t *values, __m256 scale) {
    __m256i x = _mm256_loadu_si256((const __m256i *)values);
    __m256i magnitude = _mm256_and_si256(x, _mm256_set1_epi16(KT_BF16_MAGNITUDE));
    __m256i even = magnitudes(_mm256_slli_epi32(magnitude, 16), scale);
    __m256i odd = magnitudes(_mm256_and_si256(magnitude, _mm256_set1_epi32(0x7fff0000)), scale);
    __m256i both = _mm256_add_epi32(even, _mm256_slli_epi32(odd, 8));
    both = _mm256_sub_epi32(both, _mm256_set1_epi32((KT_E4M3_LEAST >> 20) * 0x101));
    /* the signs: bit 15 to bit 7, bit 31 to bit 15 */
    both = _mm256_or_si256(both, _mm256_and_si256(_mm256_srli_epi32(x, 8), _mm256_set1_epi32(0x80)));
    return _mm256_or_si256(both, _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(0x8000)));
}

KT_TARGET_AVX2 void kt_e4m3_avx2(const uint8_t *values, int64_t count, float scale, uint8_t *codes) {
    const __m256 s = _mm256_set1_ps(scale);
    for (int64_t i = 0; i < count; i += 32) {
        __m256i packed = _mm256_packus_epi32(pairs(values + 2 * i, s), pairs(values + 2 * i + 32, s));
        /* vpackusdw works within 128-bit lanes */
        _mm256_storeu_si256((__m256i *)(codes + i), _mm256_permute4x64_epi64(packed, 0xd8));
    }
}
