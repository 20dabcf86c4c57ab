/* AVX-512 F, BW and VL, 16 or 32 columns at a time. 4 bits: the 16 products of a group's scale are made once, as BF16,
 * and its codes are looked up in them. 8 bits: codes are multiplied and rounded. What is left at the end of a group, FP8
 * NaN, and a group whose scale is not finite, are left to the scalar kernel. */
#include <immintrin.h>

#include "bf16.h"
#include "codes.h"
#include "kernels.h"

/* Float32 to BF16 bits (kt_to_bf16), one in each 32-bit lane; not for NaN. */
KT_TARGET_AVX512 static inline __m512i to_bf16(__m512 x) {
    __m512i u = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    return _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
}

/* decode_<kind>: `columns` (a multiple of 16) codes that begin at a whole byte; whether all were good. */

KT_TARGET_AVX512 static int decode_nibbles(const float *values, const uint8_t *codes, int64_t columns, float scale,
                                           uint16_t *out) {
    __m512 products = _mm512_mul_ps(_mm512_loadu_ps(values), _mm512_set1_ps(scale));
    __m512i table = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(to_bf16(products)));
    /* A byte is two columns: the lower goes to the lower half of a lane of 32 bits, the upper to the upper half. */
    for (; columns >= 32; columns -= 32, codes += 16, out += 32) {
        __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
        __m512i index = _mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 12));
        index = _mm512_and_si512(index, _mm512_set1_epi16(15));
        _mm512_storeu_si512(out, _mm512_permutexvar_epi16(index, table));
    }
    if (columns) {
        __m256i pairs = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)codes));
        __m256i index = _mm256_or_si256(pairs, _mm256_slli_epi32(pairs, 12));
        index = _mm256_and_si256(index, _mm256_set1_epi16(15));
        _mm256_storeu_si256((__m256i *)out, _mm256_permutexvar_epi16(index, _mm512_castsi512_si256(table)));
    }
    return 1;
}

KT_TARGET_AVX512 static int decode_int8(const uint8_t *codes, int64_t columns, float scale, uint16_t *out) {
    for (int64_t c = 0; c < columns; c += 16) {
        __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + c)));
        __m512 x = _mm512_cvtepi32_ps(_mm512_sub_epi32(code, _mm512_set1_epi32(128)));
        __m512i bf16 = to_bf16(_mm512_mul_ps(x, _mm512_set1_ps(scale)));
        _mm256_storeu_si256((__m256i *)(out + c), _mm512_cvtepi32_epi16(bf16));
    }
    return 1;
}

/* A code, shifted, is the FP16 value that is 2^-8 of its own. */
KT_TARGET_AVX512 static int decode_fp8(const uint8_t *codes, int64_t columns, float scale, uint16_t *out) {
    __m256i largest = _mm256_setzero_si256();
    for (int64_t c = 0; c < columns; c += 16) {
        __m256i code = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(codes + c)));
        __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi16(0x7f));
        largest = _mm256_max_epu16(largest, magnitude);
        __m256i sign = _mm256_slli_epi16(_mm256_xor_si256(code, magnitude), 8);
        __m512 x = _mm512_cvtph_ps(_mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign));
        __m512i bf16 = to_bf16(_mm512_mul_ps(x, _mm512_set1_ps(scale * 0x1p8f)));
        _mm256_storeu_si256((__m256i *)(out + c), _mm512_cvtepi32_epi16(bf16));
    }
    return !_mm256_cmpeq_epi16_mask(largest, _mm256_set1_epi16(0x7f));
}

KT_TARGET_AVX512 static int decode(int kind, const uint8_t *codes, int64_t columns, float scale, uint16_t *out) {
    switch (kind) {
    case KTQ_FP8_E4M3: return decode_fp8(codes, columns, scale, out);
    case KTQ_INT8: return decode_int8(codes, columns, scale, out);
    }
    return decode_nibbles(kt_values_of_codes(kind), codes, columns, scale, out);
}

KT_TARGET_AVX512 void kt_decode_codes_avx512(const kt_codes *row, uint16_t *out) {
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
