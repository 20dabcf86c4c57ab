/* Activations to int8, AVX2: 32 columns at a time. The second reading of the row comes from L1 or L2. */
#include <immintrin.h>

#include "convert/pack_avx2.h"
#include "quantize_row.h"

KT_TARGET_AVX2 static inline __m256i magnitude(const float *x) {
    return _mm256_and_si256(_mm256_loadu_si256((const __m256i *)x), _mm256_set1_epi32(0x7fffffff));
}

/* Without the sign, float32 bits order as the values do. */
KT_TARGET_AVX2 static uint32_t amax_of_floats(const float *x, int64_t k) {
    __m256i a = magnitude(x), b = a, c = a, d = a;
    for (int64_t j = 0; j < k; j += 32) {
        a = _mm256_max_epu32(a, magnitude(x + j));
        b = _mm256_max_epu32(b, magnitude(x + j + 8));
        c = _mm256_max_epu32(c, magnitude(x + j + 16));
        d = _mm256_max_epu32(d, magnitude(x + j + 24));
    }
    a = _mm256_max_epu32(_mm256_max_epu32(a, b), _mm256_max_epu32(c, d));
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1)));
}

/* 32 codes in their order. The packing instructions work within 128-bit lanes. */
KT_TARGET_AVX2 static inline __m256i codes_of_bf16(const void *x, __m256 reciprocal) {
    return _mm256_permute4x64_epi64(kt_int8_codes(x, reciprocal), 0xd8);
}

KT_TARGET_AVX2 static inline __m256i to_integers(const float *x, __m256 reciprocal) {
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), reciprocal)); /* to nearest even */
}

KT_TARGET_AVX2 static inline __m256i codes_of_floats(const void *x, __m256 reciprocal) {
    const float *p = x;
    __m256i low = _mm256_packs_epi32(to_integers(p, reciprocal), to_integers(p + 8, reciprocal));
    __m256i high = _mm256_packs_epi32(to_integers(p + 16, reciprocal), to_integers(p + 24, reciprocal));
    return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

KT_TARGET_AVX2 static inline int32_t total(__m256i int32) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(int32), _mm256_extracti128_si256(int32, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

/* Squares of codes in int32: their sum over 65536 columns fits. */
KT_TARGET_AVX2 static inline __m256i squares(__m256i codes) {
    __m256i magnitude = _mm256_abs_epi8(codes);
    return _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, magnitude), _mm256_set1_epi16(1));
}

KT_TARGET_AVX2 float kt_quantize_row_avx2(int is_bf16, const void *x, int64_t k, int64_t copies,
                                              const kt_code_row *place, int32_t *sums, int64_t *energy) {
    float scale = kt_scale_of(is_bf16 ? (uint32_t)kt_amax_avx2(x, k) << 16 : amax_of_floats(x, k));
    if (!(scale > 0)) {
        kt_quantize_to_zero(k, copies, place, sums);
        *energy = 0;
        return scale;
    }
    const __m256 reciprocal = _mm256_set1_ps(1.0f / scale);
    const __m256i ones = _mm256_set1_epi8(1);
    __m256i all = _mm256_setzero_si256();
    for (int64_t first = 0; first < k; first += KT_K_BLOCK) {
        __m256i sum = _mm256_setzero_si256(); /* of pairs, in int16: at most 112 * 254 */
        for (int64_t j = first; j < k && j < first + KT_K_BLOCK; j += 32) {
            __m256i codes = is_bf16 ? codes_of_bf16((const uint16_t *)x + j, reciprocal)
                                    : codes_of_floats((const float *)x + j, reciprocal);
            for (int64_t i = 0; i < copies; i++)
                _mm256_storeu_si256((__m256i *)(place[i].q + j / 64 * place[i].pitch + j % 64), codes);
            all = _mm256_add_epi32(all, squares(codes));
            sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(ones, codes));
        }
        sums[first / KT_K_BLOCK] = total(_mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
    }
    *energy = total(all);
    return scale;
}
