/* AVX2. 4 bits: the 16 products of a group's scale are made once, as BF16, and its codes are looked up in their lower
 * and upper bytes, 32 at a time. 8 bits: 8 codes at a time are multiplied and rounded. What is left at the end of a
 * group, and a group whose scale is not finite, is left to the scalar kernel. */
#include <immintrin.h>

#include "bf16.h"
#include "kernels.h"

/* Float32 to BF16 bits (kt_to_bf16), one in each 32-bit lane; not for NaN. */
KT_TARGET_AVX2 static inline __m256i to_bf16(__m256 x) {
    __m256i u = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
}

/* 32-bit lanes to 16-bit ones, in order. */
KT_TARGET_AVX2 static inline __m128i narrow(__m256i u) {
    return _mm_packus_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1));
}

/* `columns` (a multiple of 32) 4-bit codes that begin at a whole byte. */
KT_TARGET_AVX2 static void decode_int4(const uint8_t *codes, int64_t columns, float scale, uint16_t *out) {
    __m256 factor = _mm256_set1_ps(scale);
    __m128i negative = narrow(to_bf16(_mm256_mul_ps(_mm256_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1), factor)));
    __m128i positive = narrow(to_bf16(_mm256_mul_ps(_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), factor)));
    const __m128i byte = _mm_set1_epi16(0xff);
    __m128i low = _mm_packus_epi16(_mm_and_si128(negative, byte), _mm_and_si128(positive, byte));
    __m128i high = _mm_packus_epi16(_mm_srli_epi16(negative, 8), _mm_srli_epi16(positive, 8));
    for (int64_t c = 0; c < columns; c += 32) {
        __m128i pairs = _mm_loadu_si128((const __m128i *)(codes + c / 2)), nibble = _mm_set1_epi8(15);
        __m128i even = _mm_and_si128(pairs, nibble), odd = _mm_and_si128(_mm_srli_epi16(pairs, 4), nibble);
        __m128i index[2] = {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)};
        for (int half = 0; half < 2; half++) {
            __m128i lower = _mm_shuffle_epi8(low, index[half]), upper = _mm_shuffle_epi8(high, index[half]);
            _mm_storeu_si128((__m128i *)(out + c + 16 * half), _mm_unpacklo_epi8(lower, upper));
            _mm_storeu_si128((__m128i *)(out + c + 16 * half + 8), _mm_unpackhi_epi8(lower, upper));
        }
    }
}

/* `columns` (a multiple of 8) 8-bit codes. */
KT_TARGET_AVX2 static void decode_int8(const uint8_t *codes, int64_t columns, float scale, uint16_t *out) {
    for (int64_t c = 0; c < columns; c += 8) {
        __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(codes + c)));
        __m256 x = _mm256_cvtepi32_ps(_mm256_sub_epi32(code, _mm256_set1_epi32(128)));
        _mm_storeu_si128((__m128i *)(out + c), narrow(to_bf16(_mm256_mul_ps(x, _mm256_set1_ps(scale)))));
    }
}

KT_TARGET_AVX2 void kt_decode_codes_avx2(const kt_codes *row, uint16_t *out) {
    int64_t step = row->bits == 4 ? 32 : 8, group = row->first / row->group;
    for (int64_t c = 0, stop; c < row->columns; c = stop, group++) {
        stop = kt_end_of_group(row, group);
        kt_codes part = kt_codes_of_group(row, group, c, stop);
        int64_t whole = part.skip == 0 && kt_is_finite(part.scales[0]) ? (stop - c) / step * step : 0;
        if (row->bits == 4)
            decode_int4(part.codes, whole, part.scales[0], out + c);
        else
            decode_int8(part.codes, whole, part.scales[0], out + c);
        if (c + whole == stop) continue;
        part = kt_codes_of_group(row, group, c + whole, stop);
        kt_decode_codes_scalar(&part, out + c + whole);
    }
}
