/* AVX-512 F, BW and VL. 4 bits: the 16 products of a group's scale are made once, as BF16, and its codes are looked up
 * in them, 32 at a time. 8 bits: 16 codes at a time are multiplied and rounded. What is left at the end of a group, and
 * a group whose scale is not finite, is left to the scalar kernel. */
#include <immintrin.h>

#include "bf16.h"
#include "kernels.h"

/* Float32 to BF16 bits (kt_to_bf16), one in each 32-bit lane; not for NaN. */
KT_TARGET_AVX512 static inline __m512i to_bf16(__m512 x) {
    __m512i u = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    return _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
}

/* `columns` (a multiple of 32) 4-bit codes that begin at a whole byte. */
KT_TARGET_AVX512 static void decode_int4(const uint8_t *codes, int64_t columns, float scale, uint16_t *out) {
    const __m512 steps = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    __m512i table = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(to_bf16(_mm512_mul_ps(steps, _mm512_set1_ps(scale)))));
    for (int64_t c = 0; c < columns; c += 32) {
        /* A byte is two columns: the lower goes to the lower half of a lane of 32 bits, the upper to the upper half. */
        __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + c / 2)));
        __m512i index = _mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 12));
        index = _mm512_and_si512(index, _mm512_set1_epi16(15));
        _mm512_storeu_si512(out + c, _mm512_permutexvar_epi16(index, table));
    }
}

/* `columns` (a multiple of 16) 8-bit codes. */
KT_TARGET_AVX512 static void decode_int8(const uint8_t *codes, int64_t columns, float scale, uint16_t *out) {
    for (int64_t c = 0; c < columns; c += 16) {
        __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + c)));
        __m512 x = _mm512_cvtepi32_ps(_mm512_sub_epi32(code, _mm512_set1_epi32(128)));
        __m512i bf16 = to_bf16(_mm512_mul_ps(x, _mm512_set1_ps(scale)));
        _mm256_storeu_si256((__m256i *)(out + c), _mm512_cvtepi32_epi16(bf16));
    }
}

KT_TARGET_AVX512 void kt_decode_codes_avx512(const kt_codes *row, uint16_t *out) {
    int64_t step = row->bits == 4 ? 32 : 16, group = row->first / row->group;
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
