/* AVX2: 8 rows at a time, a register for each pair of columns, so that a row is a lane of 32 bits. The magnitudes a, by
 * the lower of the two exponents, are integers of 16 bits in 512ths. */
#include "bf16.h"
#include "pack_avx2.h"
#include "pack_mxfp4.h"

enum { ROWS = 8, PAIRS = KT_GROUP_COLUMNS / 2 };

/* 1024ths to the nearest integer, ties to even. */
KT_TARGET_AVX2 static inline __m256i rounded(__m256i x) {
    __m256i odd = _mm256_and_si256(_mm256_srli_epi16(x, 10), _mm256_set1_epi16(1));
    return _mm256_srli_epi16(_mm256_add_epi16(_mm256_add_epi16(x, _mm256_set1_epi16(511)), odd), 10);
}

/* What codes of 16 bits stand for, in 512ths: `values` has 256ths of that. */
KT_TARGET_AVX2 static inline __m256i values_of(__m256i codes, __m256i values) {
    return _mm256_slli_epi16(_mm256_shuffle_epi8(values, codes), 8);
}

/* Magnitudes of a pair of columns, times the scale of their rows. */
KT_TARGET_AVX2 static inline __m256i fixed_point(__m256i bits, __m256 scale) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fff0000);
    __m256 even = _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(bits, 16), magnitude));
    __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(bits, magnitude));
    __m256i high = _mm256_slli_epi32(_mm256_cvttps_epi32(_mm256_mul_ps(odd, scale)), 16);
    return _mm256_or_si256(_mm256_cvttps_epi32(_mm256_mul_ps(even, scale)), high);
}

/* Pairs of columns of 8 rows, KT_HALF_ROWS words apart. Returns 0 if these rows are not for vectors. */
KT_TARGET_AVX2 static int pack_rows(const uint8_t *pairs, uint8_t *codes, uint8_t *exponents) {
    __m256i largest = _mm256_setzero_si256();
    for (int p = 0; p < PAIRS; p++) {
        __m256i bits = _mm256_load_si256((const __m256i *)(pairs + 64 * p));
        largest = _mm256_max_epu16(largest, _mm256_and_si256(bits, _mm256_set1_epi16(KT_BF16_MAGNITUDE)));
    }
    __m256i amax = _mm256_and_si256(_mm256_max_epu16(largest, _mm256_srli_epi32(largest, 16)),
                                    _mm256_set1_epi32(KT_BF16_MAGNITUDE));
    __m256i exponent = _mm256_srli_epi32(amax, 7), least = _mm256_set1_epi32(KT_MXFP4_NORMAL);
    __m256i zeros = _mm256_cmpeq_epi32(amax, _mm256_setzero_si256());
    __m256i small_rows = _mm256_andnot_si256(zeros, _mm256_cmpgt_epi32(least, exponent));
    __m256i large_rows = _mm256_cmpgt_epi32(exponent, _mm256_set1_epi32(KT_MXFP4_HUGE - 1));
    if (_mm256_movemask_epi8(_mm256_or_si256(small_rows, large_rows))) return 0;
    exponent = _mm256_max_epi32(exponent, least);

    const __m256i values = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0));
    const __m256i doubled = _mm256_slli_epi16(values, 1);
    /* 512 * 2^(127 - e), e = exponent - 2 */
    __m256 scale = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_sub_epi32(_mm256_set1_epi32(265), exponent), 23));
    __m256i small_error = _mm256_setzero_si256(), large_error = _mm256_setzero_si256(), small[4], large[4], signs[4];
    for (int v = 0; v < 4; v++) {
        small[v] = large[v] = signs[v] = _mm256_setzero_si256();
        for (int g = 0; g < 4; g++) {
            __m256i bits = _mm256_load_si256((const __m256i *)(pairs + 64 * (4 * v + g)));
            __m256i a = fixed_point(bits, scale), twice = _mm256_slli_epi16(a, 1);
            /* The code of a is a rounding of 2a, 2 + a or 4 + a/2, whichever is least; by the higher exponent, of a or
               2 + a/2. */
            __m256i low = _mm256_min_epu16(_mm256_slli_epi16(a, 2), _mm256_add_epi16(twice, _mm256_set1_epi16(2048)));
            low = _mm256_min_epu16(low, _mm256_add_epi16(a, _mm256_set1_epi16(4096)));
            low = rounded(_mm256_min_epu16(low, _mm256_set1_epi16(7 * 1024)));
            __m256i high = rounded(_mm256_min_epu16(twice, _mm256_add_epi16(a, _mm256_set1_epi16(2048))));
            __m256i d = _mm256_sub_epi16(a, values_of(low, values));
            small_error = _mm256_add_epi32(small_error, _mm256_madd_epi16(d, d));
            d = _mm256_sub_epi16(a, values_of(high, doubled));
            large_error = _mm256_add_epi32(large_error, _mm256_madd_epi16(d, d));
            small[v] = _mm256_or_si256(small[v], _mm256_slli_epi16(low, 4 * g));
            large[v] = _mm256_or_si256(large[v], _mm256_slli_epi16(high, 4 * g));
            __m256i sign = _mm256_and_si256(bits, _mm256_set1_epi16((short)0x8000));
            signs[v] = _mm256_or_si256(signs[v], _mm256_srli_epi16(sign, 12 - 4 * g));
        }
    }
    __m256i higher = _mm256_cmpgt_epi32(small_error, large_error);
    for (int v = 0; v < 4; v++)
        _mm256_storeu_si256((__m256i *)(codes + 64 * v),
                            _mm256_or_si256(_mm256_blendv_epi8(small[v], large[v], higher), signs[v]));
    __m256i e = _mm256_sub_epi32(_mm256_sub_epi32(exponent, _mm256_set1_epi32(2)), higher);
    e = _mm256_blendv_epi8(e, _mm256_set1_epi32(KT_MXFP4_OF_ZEROS), zeros);
    __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(e), _mm256_extracti128_si256(e, 1));
    _mm_storel_epi64((__m128i *)exponents, _mm_packus_epi16(words, words));
    return 1;
}

KT_TARGET_AVX2 int kt_pack_mxfp4_avx2(const uint8_t *rows, int64_t row_stride, uint8_t *codes, uint8_t *exponents,
                                      const kt_ahead *ahead) {
    _Alignas(32) uint8_t pairs[PAIRS * 4 * KT_HALF_ROWS];
    for (int first = 0; first < KT_HALF_ROWS; first += ROWS)
        for (int half = 0; half < 2; half++) { /* of the columns */
            __m256i in[ROWS];
            for (int r = 0; r < ROWS; r++)
                in[r] = _mm256_loadu_si256((const __m256i *)(rows + (first + r) * row_stride + 32 * half));
            kt_store_quads(in, 1, pairs + 512 * half + 4 * first);
        }
    for (int r = 0; r < KT_HALF_ROWS; r++) kt_fetch(ahead, r, 0, KT_GROUP_COLUMNS);
    for (int first = 0; first < KT_HALF_ROWS; first += ROWS)
        if (!pack_rows(pairs + 4 * first, codes + 4 * first, exponents + first))
            return kt_pack_mxfp4_scalar(rows, row_stride, codes, exponents, ahead);
    return 1;
}
