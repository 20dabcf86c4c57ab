/* AVX2 and F16C, 16 or 32 columns at a time. 4 bits: the 16 products of a group's scale are made once, as BF16, and its
 * codes are looked up in their lower and upper bytes. 8 bits: codes are multiplied and rounded. What is left at the end
 * of a group, FP8 NaN, and a group whose scale is not finite, are left to the scalar kernel. */
#include <immintrin.h>

#include "bf16.h"
#include "codes.h"
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

/* 16 columns: the entries of a table, by their lower and upper bytes. */
KT_TARGET_AVX2 static inline void look_up(__m128i low, __m128i high, __m128i index, uint16_t *out) {
    __m128i lower = _mm_shuffle_epi8(low, index), upper = _mm_shuffle_epi8(high, index);
    _mm_storeu_si128((__m128i *)out, _mm_unpacklo_epi8(lower, upper));
    _mm_storeu_si128((__m128i *)(out + 8), _mm_unpackhi_epi8(lower, upper));
}

/* decode_<kind>: `columns` (a multiple of 16) codes that begin at a whole byte; whether all were good. */

KT_TARGET_AVX2 static int decode_nibbles(const float *values, const uint8_t *codes, int64_t columns, float scale,
                                         uint16_t *out) {
    __m256 factor = _mm256_set1_ps(scale);
    __m128i first = narrow(to_bf16(_mm256_mul_ps(_mm256_loadu_ps(values), factor)));
    __m128i second = narrow(to_bf16(_mm256_mul_ps(_mm256_loadu_ps(values + 8), factor)));
    const __m128i byte = _mm_set1_epi16(0xff), nibble = _mm_set1_epi8(15);
    __m128i low = _mm_packus_epi16(_mm_and_si128(first, byte), _mm_and_si128(second, byte));
    __m128i high = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8));
    for (; columns >= 32; columns -= 32, codes += 16, out += 32) {
        __m128i pairs = _mm_loadu_si128((const __m128i *)codes);
        __m128i even = _mm_and_si128(pairs, nibble), odd = _mm_and_si128(_mm_srli_epi16(pairs, 4), nibble);
        look_up(low, high, _mm_unpacklo_epi8(even, odd), out);
        look_up(low, high, _mm_unpackhi_epi8(even, odd), out + 16);
    }
    if (columns) {
        __m128i pairs = _mm_loadl_epi64((const __m128i *)codes);
        __m128i even = _mm_and_si128(pairs, nibble), odd = _mm_and_si128(_mm_srli_epi16(pairs, 4), nibble);
        look_up(low, high, _mm_unpacklo_epi8(even, odd), out);
    }
    return 1;
}

KT_TARGET_AVX2 static int decode_int8(const uint8_t *codes, int64_t columns, float scale, uint16_t *out) {
    for (int64_t c = 0; c < columns; c += 8) {
        __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(codes + c)));
        __m256 x = _mm256_cvtepi32_ps(_mm256_sub_epi32(code, _mm256_set1_epi32(128)));
        _mm_storeu_si128((__m128i *)(out + c), narrow(to_bf16(_mm256_mul_ps(x, _mm256_set1_ps(scale)))));
    }
    return 1;
}

/* A code, shifted, is the FP16 value that is 2^-8 of its own. */
KT_TARGET_AVX2 static int decode_fp8(const uint8_t *codes, int64_t columns, float scale, uint16_t *out) {
    __m256 factor = _mm256_set1_ps(scale * 0x1p8f);
    __m256i largest = _mm256_setzero_si256();
    for (int64_t c = 0; c < columns; c += 16) {
        __m256i code = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(codes + c)));
        __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi16(0x7f));
        largest = _mm256_max_epu16(largest, magnitude);
        __m256i sign = _mm256_slli_epi16(_mm256_xor_si256(code, magnitude), 8);
        __m256i fp16 = _mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign);
        __m256 a = _mm256_cvtph_ps(_mm256_castsi256_si128(fp16));
        __m256 b = _mm256_cvtph_ps(_mm256_extracti128_si256(fp16, 1));
        _mm_storeu_si128((__m128i *)(out + c), narrow(to_bf16(_mm256_mul_ps(a, factor))));
        _mm_storeu_si128((__m128i *)(out + c + 8), narrow(to_bf16(_mm256_mul_ps(b, factor))));
    }
    return !_mm256_movemask_epi8(_mm256_cmpeq_epi16(largest, _mm256_set1_epi16(0x7f)));
}

KT_TARGET_AVX2 static int decode(int kind, const uint8_t *codes, int64_t columns, float scale, uint16_t *out) {
    switch (kind) {
    case KTQ_FP8_E4M3: return decode_fp8(codes, columns, scale, out);
    case KTQ_INT8: return decode_int8(codes, columns, scale, out);
    }
    return decode_nibbles(kt_values_of_codes(kind), codes, columns, scale, out);
}

KT_TARGET_AVX2 void kt_decode_codes_avx2(const kt_codes *row, uint16_t *out) {
    int64_t group = row->first / row->group;
    for (int64_t c = 0, stop; c < row->columns; c = stop, group++) {
        stop = kt_end_of_group(row, group);
        kt_codes part = kt_codes_of_group(row, group, c, stop);
        int64_t whole = part.skip == 0 && kt_is_finite(part.scales[0] * 0x1p8f) ? (stop - c) / 16 * 16 : 0;
        if (!decode(row->kind, part.codes, whole, part.scales[0], out + c)) whole = 0;
        if (c + whole == stop) continue;
        part = kt_codes_of_group(row, group, c + whole, stop);
        kt_decode_codes_scalar(&part, out + c + whole);
    }
}
