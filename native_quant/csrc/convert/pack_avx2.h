/* Shared by both AVX2 packers: 32 BF16 values to 32 INT8 codes, and the transpose of half a half tile, which is 8 rows
 * of 8 quads here (pack_avx512.h has the drawing). vpacksswb works within 128-bit lanes, so a register of 32 codes
 * holds its quads in the order 0 1 4 5, 2 3 6 7; the transpose stores each where it belongs.
 */
#ifndef KT_PACK_AVX2_H
#define KT_PACK_AVX2_H

#include <immintrin.h>

#include "kernels.h"

/* round-half-to-even(fl32(x * reciprocal)) of 16 BF16 values: int16, in their order. See kt_int16_codes in
 * pack_avx512.h. */
KT_TARGET_AVX2 static inline __m256i kt_int16_codes(const uint8_t *p, __m256 reciprocal) {
    const __m256 magic = _mm256_set1_ps(0x1.8p23f);
    __m256i bf16 = _mm256_loadu_si256((const __m256i *)p);
    __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(bf16, 16));
    __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(bf16, _mm256_set1_epi32((int)0xffff0000)));
    even = _mm256_add_ps(_mm256_mul_ps(even, reciprocal), magic);
    odd = _mm256_add_ps(_mm256_mul_ps(odd, reciprocal), magic);
    return _mm256_blend_epi16(_mm256_castps_si256(even), _mm256_slli_epi32(_mm256_castps_si256(odd), 16), 0xaa);
}

/* 32 columns of a row: 32 codes, quads in the order of vpacksswb. */
KT_TARGET_AVX2 static inline __m256i kt_int8_codes(const uint8_t *bf16, __m256 reciprocal) {
    return _mm256_packs_epi16(kt_int16_codes(bf16, reciprocal), kt_int16_codes(bf16 + 32, reciprocal));
}

/* rows[8], quads in order or in the order of vpacksswb -> 32 bytes at half + 64 * quad. */
KT_TARGET_AVX2 static inline void kt_store_quads(const __m256i *rows, int in_order, uint8_t *half) {
    __m256i turned[2][4]; /* [g][q]: in lane l, the q-th quad of lane l of rows 4g..4g+3 */
    for (int g = 0; g < 2; g++) {
        const __m256i *r = rows + 4 * g;
        __m256i low01 = _mm256_unpacklo_epi32(r[0], r[1]), high01 = _mm256_unpackhi_epi32(r[0], r[1]);
        __m256i low23 = _mm256_unpacklo_epi32(r[2], r[3]), high23 = _mm256_unpackhi_epi32(r[2], r[3]);
        turned[g][0] = _mm256_unpacklo_epi64(low01, low23);
        turned[g][1] = _mm256_unpackhi_epi64(low01, low23);
        turned[g][2] = _mm256_unpacklo_epi64(high01, high23);
        turned[g][3] = _mm256_unpackhi_epi64(high01, high23);
    }
    for (int q = 0; q < 4; q++) {
        /* vpacksswb: the first quad of lane l is 2l, the third 2l + 4. */
        uint8_t *to = half + 64 * (in_order || q < 2 ? q : q + 2), *upper = to + (in_order ? 256 : 128);
        _mm256_storeu_si256((__m256i *)to, _mm256_permute2x128_si256(turned[0][q], turned[1][q], 0x20));
        _mm256_storeu_si256((__m256i *)upper, _mm256_permute2x128_si256(turned[0][q], turned[1][q], 0x31));
    }
}

/* Prefetches `columns` columns from `column` on of row r of the 16 rows that come next, into L2. */
KT_TARGET_AVX2 static inline void kt_fetch(const kt_ahead *ahead, int64_t r, int64_t column, int64_t columns) {
    const char *at = (const char *)ahead->first + r * ahead->row_stride + (column * ahead->column_bits >> 3);
    int64_t bytes = columns * ahead->column_bits >> 3;
    for (int64_t done = 0; done < bytes; done += 64) _mm_prefetch(at + done, _MM_HINT_T1);
}

#endif
