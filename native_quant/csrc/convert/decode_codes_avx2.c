/* AVX2. 4 bits: the 16 values of a group are made once, as BF16, and its codes are looked up in their lower and upper
 * bytes, 32 at a time. 8 bits, and columns that name their groups: 8 codes at a time are multiplied and rounded. What
 * is left at the end of a group, and a group whose scale is not finite, is left to the scalar kernel. */
#include <immintrin.h>
#include <string.h>

#include "bf16.h"
#include "bf16_avx2.h"
#include "kernels.h"

/* `columns` (a multiple of 32) 4-bit codes of one group that begin at a whole byte. */
KT_TARGET_AVX2 static void decode_int4(const uint8_t *codes, int64_t columns, float scale, float zero, uint16_t *out) {
    const __m256 few = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), many = _mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15);
    __m256 factor = _mm256_set1_ps(scale), less = _mm256_set1_ps(zero);
    __m128i lower_half = narrow(to_bf16(_mm256_mul_ps(_mm256_sub_ps(few, less), factor)));
    __m128i upper_half = narrow(to_bf16(_mm256_mul_ps(_mm256_sub_ps(many, less), factor)));
    const __m128i byte = _mm_set1_epi16(0xff);
    __m128i low = _mm_packus_epi16(_mm_and_si128(lower_half, byte), _mm_and_si128(upper_half, byte));
    __m128i high = _mm_packus_epi16(_mm_srli_epi16(lower_half, 8), _mm_srli_epi16(upper_half, 8));
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

/* 8 codes less their zero points, times their scales. */
KT_TARGET_AVX2 static inline void store(__m256i codes, __m256 zeros, __m256 scales, uint16_t *out) {
    __m256 values = _mm256_mul_ps(_mm256_sub_ps(_mm256_cvtepi32_ps(codes), zeros), scales);
    _mm_storeu_si128((__m128i *)out, narrow(to_bf16(values)));
}

/* 8 8-bit codes. */
KT_TARGET_AVX2 static inline __m256i load_int8(const uint8_t *codes, uint8_t flip) {
    return _mm256_xor_si256(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)codes)), _mm256_set1_epi32(flip));
}

/* 8 4-bit codes. */
KT_TARGET_AVX2 static inline __m256i load_int4(const uint8_t *codes) {
    int word;
    memcpy(&word, codes, sizeof word);
    __m256i shifted = _mm256_srlv_epi32(_mm256_set1_epi32(word), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    return _mm256_and_si256(shifted, _mm256_set1_epi32(15));
}

/* `columns` (a multiple of 8) codes of a row whose columns name their groups, from a whole byte on; whether all scales
 * were finite. */
KT_TARGET_AVX2 static int decode_named(const kt_codes *row, int64_t columns, uint16_t *out) {
    __m256i largest = _mm256_setzero_si256(), magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256 zeros = _mm256_set1_ps(kt_zero_of(row, 0));
    for (int64_t c = 0; c < columns; c += 8) {
        __m256i group = _mm256_loadu_si256((const __m256i *)(row->group_of + c));
        __m256 scales = _mm256_i32gather_ps(row->scales, group, 4);
        if (row->zeros) zeros = _mm256_i32gather_ps(row->zeros, group, 4);
        largest = _mm256_max_epu32(largest, _mm256_and_si256(_mm256_castps_si256(scales), magnitude));
        store(row->bits == 4 ? load_int4(row->codes + c / 2) : load_int8(row->codes + c, row->flip), zeros, scales,
              out + c);
    }
    return !_mm256_movemask_epi8(_mm256_cmpgt_epi32(largest, _mm256_set1_epi32(0x7f7fffff)));
}

KT_TARGET_AVX2 static void decode_group(const kt_codes *part, int64_t columns, uint16_t *out) {
    int64_t group = part->first / part->group;
    float scale = part->scales[group], zero = kt_zero_of(part, group);
    if (part->bits == 4) {
        decode_int4(part->codes, columns, scale, zero, out);
        return;
    }
    __m256 scales = _mm256_set1_ps(scale), zeros = _mm256_set1_ps(zero);
    for (int64_t c = 0; c < columns; c += 8) store(load_int8(part->codes + c, part->flip), zeros, scales, out + c);
}

KT_TARGET_AVX2 void kt_decode_codes_avx2(const kt_codes *row, uint16_t *out) {
    if (row->group_of) {
        int64_t whole = row->bits == 4 && row->skip % 2 ? 0 : row->columns / 8 * 8;
        kt_codes all = kt_codes_between(row, 0, row->columns);
        if (!decode_named(&all, whole, out)) whole = 0;
        kt_codes rest = kt_codes_between(row, whole, row->columns);
        kt_decode_codes_scalar(&rest, out + whole);
        return;
    }
    int64_t step = row->bits == 4 ? 32 : 8, group = row->first / row->group;
    for (int64_t c = 0, stop; c < row->columns; c = stop, group++) {
        stop = kt_end_of_group(row, group);
        kt_codes part = kt_codes_between(row, c, stop);
        int64_t whole = part.skip == 0 && kt_is_finite(part.scales[group]) ? (stop - c) / step * step : 0;
        decode_group(&part, whole, out + c);
        if (c + whole == stop) continue;
        part = kt_codes_between(row, c + whole, stop);
        kt_decode_codes_scalar(&part, out + c + whole);
    }
}
