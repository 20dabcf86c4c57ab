/* AVX-512 F, BW and VL. 4 bits: the 16 values of a group are made once, as BF16, and its codes are looked up in them, 32
 * at a time. 8 bits, and columns that name their groups: 16 codes at a time are multiplied and rounded. What is left at
 * the end of a group, and a group whose scale is not finite, is left to the scalar kernel. */
#include <immintrin.h>

#include "bf16.h"
#include "bf16_avx512.h"
#include "kernels.h"

/* `columns` (a multiple of 32) 4-bit codes of one group that begin at a whole byte. */
KT_TARGET_AVX512 static void decode_int4(const uint8_t *codes, int64_t columns, float scale, float zero,
                                         uint16_t *out) {
    const __m512 steps = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512 values = _mm512_mul_ps(_mm512_sub_ps(steps, _mm512_set1_ps(zero)), _mm512_set1_ps(scale));
    __m512i table = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(to_bf16(values)));
    for (int64_t c = 0; c < columns; c += 32) {
        /* A byte is two columns: the lower goes to the lower half of a lane of 32 bits, the upper to the upper half. */
        __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + c / 2)));
        __m512i index = _mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 12));
        index = _mm512_and_si512(index, _mm512_set1_epi16(15));
        _mm512_storeu_si512(out + c, _mm512_permutexvar_epi16(index, table));
    }
}

/* 16 codes less their zero points, times their scales. */
KT_TARGET_AVX512 static inline void store(__m512i codes, __m512 zeros, __m512 scales, uint16_t *out) {
    __m512 values = _mm512_mul_ps(_mm512_sub_ps(_mm512_cvtepi32_ps(codes), zeros), scales);
    _mm256_storeu_si256((__m256i *)out, _mm512_cvtepi32_epi16(to_bf16(values)));
}

/* 16 8-bit codes. */
KT_TARGET_AVX512 static inline __m512i load_int8(const uint8_t *codes, uint8_t flip) {
    return _mm512_xor_si512(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes)), _mm512_set1_epi32(flip));
}

/* 16 4-bit codes. */
KT_TARGET_AVX512 static inline __m512i load_int4(const uint8_t *codes) {
    __m512i words = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1),
                                             _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i *)codes)));
    const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    return _mm512_and_si512(_mm512_srlv_epi32(words, shifts), _mm512_set1_epi32(15));
}

/* `columns` (a multiple of 16) codes of a row whose columns name their groups, from a whole byte on; whether all scales
 * were finite. */
KT_TARGET_AVX512 static int decode_named(const kt_codes *row, int64_t columns, uint16_t *out) {
    __m512i largest = _mm512_setzero_si512(), magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512 zeros = _mm512_set1_ps(kt_zero_of(row, 0));
    for (int64_t c = 0; c < columns; c += 16) {
        __m512i group = _mm512_loadu_si512(row->group_of + c);
        __m512 scales = _mm512_i32gather_ps(group, row->scales, 4);
        if (row->zeros) zeros = _mm512_i32gather_ps(group, row->zeros, 4);
        largest = _mm512_max_epu32(largest, _mm512_and_si512(_mm512_castps_si512(scales), magnitude));
        store(row->bits == 4 ? load_int4(row->codes + c / 2) : load_int8(row->codes + c, row->flip), zeros, scales,
              out + c);
    }
    return !_mm512_cmpgt_epi32_mask(largest, _mm512_set1_epi32(0x7f7fffff));
}

KT_TARGET_AVX512 static void decode_group(const kt_codes *part, int64_t columns, uint16_t *out) {
    int64_t group = part->first / part->group;
    float scale = part->scales[group], zero = kt_zero_of(part, group);
    if (part->bits == 4) {
        decode_int4(part->codes, columns, scale, zero, out);
        return;
    }
    __m512 scales = _mm512_set1_ps(scale), zeros = _mm512_set1_ps(zero);
    for (int64_t c = 0; c < columns; c += 16) store(load_int8(part->codes + c, part->flip), zeros, scales, out + c);
}

KT_TARGET_AVX512 void kt_decode_codes_avx512(const kt_codes *row, uint16_t *out) {
    if (row->group_of) {
        int64_t whole = row->bits == 4 && row->skip % 2 ? 0 : row->columns / 16 * 16;
        kt_codes all = kt_codes_between(row, 0, row->columns);
        if (!decode_named(&all, whole, out)) whole = 0;
        kt_codes rest = kt_codes_between(row, whole, row->columns);
        kt_decode_codes_scalar(&rest, out + whole);
        return;
    }
    int64_t step = row->bits == 4 ? 32 : 16, group = row->first / row->group;
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
