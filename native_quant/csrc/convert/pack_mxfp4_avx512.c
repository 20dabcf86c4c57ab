/* AVX-512 F, BW and VL: 16 rows at a time, a register for each pair of columns, so that a row is a lane of 32 bits. The
 * magnitudes a, by the lower of the two exponents, are integers of 16 bits in 512ths. */
#include "bf16.h"
#include "pack_avx512.h"
#include "pack_mxfp4.h"

/* 1024ths to the nearest integer, ties to even. */
KT_TARGET_AVX512 static inline __m512i rounded(__m512i x) {
    __m512i odd = _mm512_and_si512(_mm512_srli_epi16(x, 10), _mm512_set1_epi16(1));
    return _mm512_srli_epi16(_mm512_add_epi16(_mm512_add_epi16(x, _mm512_set1_epi16(511)), odd), 10);
}

KT_TARGET_AVX512 int kt_pack_mxfp4_avx512(const uint8_t *rows, int64_t row_stride, uint8_t *codes, uint8_t *exponents,
                                          const kt_ahead *ahead) {
    __m512i in[KT_HALF_ROWS], x[KT_HALF_ROWS], largest = _mm512_setzero_si512();
    for (int r = 0; r < KT_HALF_ROWS; r++) {
        in[r] = _mm512_loadu_si512(rows + r * row_stride);
        kt_fetch(ahead, r, 0, KT_GROUP_COLUMNS);
    }
    kt_transpose_words(in, x);
    for (int p = 0; p < 16; p++)
        largest = _mm512_max_epu16(largest, _mm512_and_si512(x[p], _mm512_set1_epi16(KT_BF16_MAGNITUDE)));
    __m512i amax = _mm512_and_si512(_mm512_max_epu16(largest, _mm512_srli_epi32(largest, 16)),
                                    _mm512_set1_epi32(KT_BF16_MAGNITUDE));
    __m512i exponent = _mm512_srli_epi32(amax, 7), least = _mm512_set1_epi32(KT_MXFP4_NORMAL);
    __mmask16 zeros = _mm512_testn_epi32_mask(amax, amax);
    if ((_mm512_cmplt_epi32_mask(exponent, least) & ~zeros) |
        _mm512_cmpge_epi32_mask(exponent, _mm512_set1_epi32(KT_MXFP4_HUGE)))
        return kt_pack_mxfp4_scalar(rows, row_stride, codes, exponents, ahead);
    exponent = _mm512_max_epi32(exponent, least);

    /* What the codes stand for, in 512ths. */
    const __m512i values =
        _mm512_castsi256_si512(_mm256_setr_epi16(0, 256, 512, 768, 1024, 1536, 2048, 3072, 0, 0, 0, 0, 0, 0, 0, 0));
    const __m512i doubled = _mm512_slli_epi16(values, 1);
    __m512i each = _mm512_or_si512(exponent, _mm512_slli_epi32(exponent, 16));
    __m512i small_error = _mm512_setzero_si512(), large_error = _mm512_setzero_si512(), small[4], large[4], signs[4];
    for (int v = 0; v < 4; v++) {
        small[v] = large[v] = signs[v] = _mm512_setzero_si512();
        for (int g = 0; g < 4; g++) {
            __m512i bits = x[4 * v + g], twice = _mm512_slli_epi16(bits, 1);
            __m512i fraction = _mm512_and_si512(bits, _mm512_set1_epi16(0x7f));
            fraction = _mm512_slli_epi16(_mm512_or_si512(fraction, _mm512_set1_epi16(0x80)), 4);
            __m512i a = _mm512_srlv_epi16(fraction, _mm512_sub_epi16(each, _mm512_srli_epi16(twice, 8)));
            /* The code of a is a rounding of 2a, 2 + a or 4 + a/2, whichever is least; by the higher exponent, of a or
               2 + a/2. */
            __m512i a2 = _mm512_slli_epi16(a, 1), shifted = _mm512_add_epi16(a2, _mm512_set1_epi16(2048));
            __m512i low = _mm512_min_epu16(_mm512_slli_epi16(a, 2), shifted);
            low = _mm512_min_epu16(low, _mm512_add_epi16(a, _mm512_set1_epi16(4096)));
            low = rounded(_mm512_min_epu16(low, _mm512_set1_epi16(7 * 1024)));
            __m512i high = rounded(_mm512_min_epu16(a2, _mm512_add_epi16(a, _mm512_set1_epi16(2048))));
            __m512i d = _mm512_sub_epi16(a, _mm512_permutexvar_epi16(low, values));
            small_error = _mm512_add_epi32(small_error, _mm512_madd_epi16(d, d));
            d = _mm512_sub_epi16(a, _mm512_permutexvar_epi16(high, doubled));
            large_error = _mm512_add_epi32(large_error, _mm512_madd_epi16(d, d));
            small[v] = _mm512_or_si512(small[v], _mm512_slli_epi16(low, 4 * g));
            large[v] = _mm512_or_si512(large[v], _mm512_slli_epi16(high, 4 * g));
            __m512i sign = _mm512_and_si512(bits, _mm512_set1_epi16((short)0x8000));
            signs[v] = _mm512_or_si512(signs[v], _mm512_srli_epi16(sign, 12 - 4 * g));
        }
    }
    __mmask16 higher = _mm512_cmpgt_epi32_mask(small_error, large_error);
    for (int v = 0; v < 4; v++)
        _mm512_storeu_si512(codes + 64 * v,
                            _mm512_or_si512(_mm512_mask_mov_epi32(small[v], higher, large[v]), signs[v]));
    __m512i e = _mm512_sub_epi32(exponent, _mm512_set1_epi32(2));
    e = _mm512_mask_add_epi32(e, higher, e, _mm512_set1_epi32(1));
    e = _mm512_mask_mov_epi32(e, zeros, _mm512_set1_epi32(KT_MXFP4_OF_ZEROS));
    _mm_storeu_si128((__m128i *)exponents, _mm512_cvtepi32_epi8(e));
    return 1;
}
