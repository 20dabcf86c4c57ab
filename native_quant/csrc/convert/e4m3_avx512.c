/* AVX-512: 32 values at a time, the even and the odd ones as float32; joined again they are two bytes in each word of
 * 32 bits. */
#include <immintrin.h>

#include "e4m3.h"

/* kt_e4m3_magnitude of x / scale in each lane, and KT_E4M3_LEAST >> 20 more. */
KT_TARGET_AVX512 static inline __m512i magnitudes(__m512i x, __m512 scale) {
    __m512 y = _mm512_div_ps(_mm512_castsi512_ps(x), scale);
    __m512i power = _mm512_and_si512(_mm512_castps_si512(y), _mm512_set1_epi32(KT_E4M3_EXPONENT));
    power = _mm512_max_epi32(power, _mm512_set1_epi32(KT_E4M3_LEAST));
    __m512i up = _mm512_add_epi32(power, _mm512_set1_epi32(KT_E4M3_UP));
    __m512i sum = _mm512_castps_si512(_mm512_add_ps(y, _mm512_castsi512_ps(up)));
    return _mm512_add_epi32(_mm512_srli_epi32(power, 20), _mm512_sub_epi32(sum, up));
}

/* 32 values: two codes in the lower half of each word. */
KT_TARGET_AVX512 static inline __m512i pairs(const uint8_t *values, __m512 scale) {
    __m512i x = _mm512_loadu_si512(values);
    __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi16(KT_BF16_MAGNITUDE));
    __m512i even = magnitudes(_mm512_slli_epi32(magnitude, 16), scale);
    __m512i odd = magnitudes(_mm512_and_si512(magnitude, _mm512_set1_epi32(0x7fff0000)), scale);
    __m512i both = _mm512_add_epi32(even, _mm512_slli_epi32(odd, 8));
    both = _mm512_sub_epi32(both, _mm512_set1_epi32((KT_E4M3_LEAST >> 20) * 0x101));
    /* the signs: bit 15 to bit 7, bit 31 to bit 15 */
    both = _mm512_or_si512(both, _mm512_and_si512(_mm512_srli_epi32(x, 8), _mm512_set1_epi32(0x80)));
    return _mm512_or_si512(both, _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(0x8000)));
}

KT_TARGET_AVX512 void kt_e4m3_avx512(const uint8_t *values, int64_t count, float scale, uint8_t *codes) {
    const __m512 s = _mm512_set1_ps(scale);
    for (int64_t i = 0; i < count; i += 32)
        _mm256_storeu_si256((__m256i *)(codes + i), _mm512_cvtepi32_epi16(pairs(values + 2 * i, s)));
}
