/* AVX-512 F, BW and VL, 16 or 32 columns at a time. A group of FP4 codes is looked up in the 16 products of its scale,
 * as BF16, or a short one in the values of the codes. FP8 codes are multiplied. What is left at the end of a group, FP8
 * NaN, and a group whose scale is not finite, are left to the scalar kernel. */
#include <immintrin.h>

#include "bf16.h"
#include "e2m1.h"
#include "kernels.h"

/* 16 float32 to BF16 (kt_to_bf16); not for NaN. */
KT_TARGET_AVX512 static inline __m256i to_bf16(__m512 x) {
    __m512i u = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    u = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(u, 16));
}

/* `columns` (a multiple of 16) FP4 codes that begin at a whole byte. */
KT_TARGET_AVX512 static inline void decode_fp4(const uint8_t *codes, int64_t columns, __m512 scale, uint16_t *out) {
    const __m512 values = _mm512_loadu_ps(kt_e2m1);
    if (columns >= 32) {
        __m512i products = _mm512_castsi256_si512(to_bf16(_mm512_mul_ps(values, scale)));
        for (; columns >= 32; columns -= 32, codes += 16, out += 32) {
            /* A byte is two columns: the lower goes to the lower half of 32 bits, the upper to the upper half. */
            __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
            __m512i index = _mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 12));
            index = _mm512_and_si512(index, _mm512_set1_epi16(15));
            _mm512_storeu_si512(out, _mm512_permutexvar_epi16(index, products));
        }
    }
    if (columns) { /* the same with 64 bits; the lowest 4 of each half are the index */
        __m512i pairs = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)codes));
        __m512i index = _mm512_or_si512(pairs, _mm512_slli_epi64(pairs, 28));
        _mm256_storeu_si256((__m256i *)out, to_bf16(_mm512_mul_ps(_mm512_permutexvar_ps(index, values), scale)));
    }
}

/* `columns` (a multiple of 16) FP8 codes; whether none was NaN. A code, shifted, is the FP16 value that is 2^-8 of its
 * own; so `scale` is 2^8 of theirs. */
KT_TARGET_AVX512 static inline int decode_fp8(const uint8_t *codes, int64_t columns, __m512 scale, uint16_t *out) {
    __m256i largest = _mm256_setzero_si256();
    for (int64_t c = 0; c < columns; c += 16) {
        __m256i code = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(codes + c)));
        __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi16(0x7f));
        largest = _mm256_max_epu16(largest, magnitude);
        __m256i sign = _mm256_slli_epi16(_mm256_xor_si256(code, magnitude), 8);
        __m512 x = _mm512_cvtph_ps(_mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign));
        _mm256_storeu_si256((__m256i *)(out + c), to_bf16(_mm512_mul_ps(x, scale)));
    }
    return !_mm256_cmpeq_epi16_mask(largest, _mm256_set1_epi16(0x7f));
}

KT_TARGET_AVX512 void kt_decode_floats_avx512(const kt_floats *row, uint16_t *out) {
    const float *scale = row->scales + row->first / row->group;
    int64_t end = row->group - row->first % row->group; /* of the group */
    for (int64_t c = 0; c < row->columns; c = end, end += row->group, scale++) {
        int64_t columns = (end < row->columns ? end : row->columns) - c, at = row->skip + c;
        int64_t whole = kt_is_finite(*scale * 0x1p8f) ? columns / 16 * 16 : 0;
        if (row->kind == KTQ_FP8_E4M3) {
            if (!decode_fp8(row->codes + at, whole, _mm512_set1_ps(*scale * 0x1p8f), out + c)) whole = 0;
        } else {
            if (at % 2) whole = 0;
            decode_fp4(row->codes + at / 2, whole, _mm512_set1_ps(*scale), out + c);
        }
        if (whole == columns) continue;
        kt_floats rest = kt_floats_of_group(row, scale, c + whole, columns - whole);
        kt_decode_floats_scalar(&rest, out + c + whole);
    }
}
