/* Activations to int8, AVX-512: 64 columns at a time. The second reading of the row comes from L1 or L2. */
#include <immintrin.h>

#include "convert/pack_avx512.h"
#include "quantize_row.h"

KT_TARGET_AVX512 static inline __m512i magnitude(const float *x) {
    return _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi32(0x7fffffff));
}

/* Without the sign, float32 bits order as the values do. */
KT_TARGET_AVX512 static uint32_t amax_of_floats(const float *x, int64_t k) {
    __m512i a = magnitude(x), b = a, c = a, d = a;
    for (int64_t j = 0; j < k; j += 64) {
        a = _mm512_max_epu32(a, magnitude(x + j));
        b = _mm512_max_epu32(b, magnitude(x + j + 16));
        c = _mm512_max_epu32(c, magnitude(x + j + 32));
        d = _mm512_max_epu32(d, magnitude(x + j + 48));
    }
    return _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_max_epu32(a, b), _mm512_max_epu32(c, d)));
}

/* 64 codes in their order. The packing instructions work within 128-bit lanes. */
KT_TARGET_AVX512 static inline __m512i codes_of_bf16(const void *x, __m512 reciprocal) {
    const uint16_t *p = x;
    __m512i packed = _mm512_packs_epi16(kt_int16_codes(_mm512_loadu_si512(p), reciprocal),
                                        kt_int16_codes(_mm512_loadu_si512(p + 32), reciprocal));
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), packed);
}

KT_TARGET_AVX512 static inline __m512i to_integers(const float *x, __m512 reciprocal) {
    return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), reciprocal)); /* to nearest even */
}

KT_TARGET_AVX512 static inline __m512i codes_of_floats(const void *x, __m512 reciprocal) {
    const float *p = x;
    __m512i low = _mm512_packs_epi32(to_integers(p, reciprocal), to_integers(p + 16, reciprocal));
    __m512i high = _mm512_packs_epi32(to_integers(p + 32, reciprocal), to_integers(p + 48, reciprocal));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
}

/* Squares of codes in int32: their sum over 65536 columns fits. */
KT_TARGET_AVX512 static inline __m512i squares(__m512i codes) {
    __m512i magnitude = _mm512_abs_epi8(codes);
    return _mm512_madd_epi16(_mm512_maddubs_epi16(magnitude, magnitude), _mm512_set1_epi16(1));
}

KT_TARGET_AVX512 float kt_quantize_row_avx512(int is_bf16, const void *x, int64_t k, int64_t copies,
                                                const kt_code_row *place, int32_t *sums, int64_t *energy) {
    float scale = kt_scale_of(is_bf16 ? (uint32_t)kt_amax_avx512(x, k) << 16 : amax_of_floats(x, k));
    if (!(scale > 0)) {
        kt_quantize_to_zero(k, copies, place, sums);
        *energy = 0;
        return scale;
    }
    const __m512 reciprocal = _mm512_set1_ps(1.0f / scale);
    const __m512i ones8 = _mm512_set1_epi8(1), ones16 = _mm512_set1_epi16(1);
    __m512i all = _mm512_setzero_si512();
    for (int64_t first = 0; first < k; first += KT_K_BLOCK) {
        __m512i sum = _mm512_setzero_si512(); /* of pairs, in int16: at most 56 * 254 */
        for (int64_t j = first; j < k && j < first + KT_K_BLOCK; j += 64) {
            __m512i codes = is_bf16 ? codes_of_bf16((const uint16_t *)x + j, reciprocal)
                                    : codes_of_floats((const float *)x + j, reciprocal);
            for (int64_t i = 0; i < copies; i++) _mm512_storeu_si512(place[i].q + j / 64 * place[i].pitch, codes);
            all = _mm512_add_epi32(all, squares(codes));
            sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(ones8, codes));
        }
        sums[first / KT_K_BLOCK] = _mm512_reduce_add_epi32(_mm512_madd_epi16(sum, ones16));
    }
    *energy = _mm512_reduce_add_epi32(all);
    return scale;
}
