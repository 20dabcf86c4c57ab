/* AVX2: 16 columns at a time, the even and the odd ones as float32 (as in groups_avx512.c). */
#include <immintrin.h>

#include "groups_row.h"

KT_TARGET_AVX2 static inline __m256i load(const uint8_t *p) {
    return _mm256_loadu_si256((const __m256i *)p);
}

KT_TARGET_AVX2 static inline uint16_t group_amax(const uint8_t *p, int64_t group) {
    const __m256i no_sign = _mm256_set1_epi16(0x7fff);
    __m256i a = _mm256_setzero_si256(), b = a;
    for (int64_t c = 0; c < group; c += 32) {
        a = _mm256_max_epu16(a, _mm256_and_si256(load(p + 2 * c), no_sign));
        b = _mm256_max_epu16(b, _mm256_and_si256(load(p + 2 * c + 32), no_sign));
    }
    a = _mm256_max_epu16(a, b);
    __m128i x = _mm_max_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    return (uint16_t)~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(x, _mm_set1_epi16(-1))), 0);
}

KT_TARGET_AVX2 static inline __m256i codes(int bits, int rounding, __m256i x, __m256 scale) {
    const float offset = bits == 4 ? 8.0f : 128.0f;
    __m256 q = _mm256_div_ps(_mm256_castsi256_ps(x), scale);
    if (rounding == KTQ_LIBRARY) {
        __m256i u = _mm256_castps_si256(q);
        __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
        u = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
        q = _mm256_castsi256_ps(_mm256_and_si256(u, _mm256_set1_epi32((int)0xffff0000)));
    }
    q = _mm256_min_ps(_mm256_max_ps(q, _mm256_set1_ps(-offset)), _mm256_set1_ps(offset - 1.0f));
    return _mm256_castps_si256(_mm256_add_ps(q, _mm256_set1_ps(0x1.8p23f + offset)));
}

/* 16 columns: in each of 8 words of 32 bits a byte of two codes (4 bits), or two bytes (8 bits), and zeros above. */
KT_TARGET_AVX2 static inline __m256i pairs(int bits, int rounding, const uint8_t *p, __m256 scale) {
    const __m256i low = _mm256_set1_epi32(bits == 4 ? 0x0f : 0xff);
    __m256i x = load(p);
    __m256i even = codes(bits, rounding, _mm256_slli_epi32(x, 16), scale);
    __m256i odd = codes(bits, rounding, _mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000)), scale);
    return _mm256_or_si256(_mm256_and_si256(even, low), _mm256_slli_epi32(_mm256_and_si256(odd, low), bits));
}

KT_TARGET_AVX2 static inline __attribute__((always_inline)) int
row_of(int bits, int rounding, int64_t group, const uint8_t *row, int64_t k, uint8_t *packed, uint16_t *scale) {
    /* All scales first: each is a chain of latencies, and those of several groups overlap. The row is in L1 the second
     * time. */
    for (int64_t g = 0; g < k / group; g++) {
        uint16_t amax = group_amax(row + 2 * g * group, group);
        if (amax >= KT_BF16_INFINITY) return 0;
        scale[g] = kt_group_scale(bits, amax);
    }
    for (int64_t g = 0; g < k / group; g++, row += 2 * group, packed += group * bits / 8) {
        const __m256 d = _mm256_set1_ps(kt_from_bf16(scale[g]));
        for (int64_t c = 0; c < group; c += 32) {
            __m256i a = pairs(bits, rounding, row + 2 * c, d), b = pairs(bits, rounding, row + 2 * c + 32, d);
            /* Packing works within 128-bit lanes: words 0-3 of a, then of b. */
            __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
            if (bits == 8)
                _mm256_storeu_si256((__m256i *)(packed + c), words);
            else
                _mm_storeu_si128((__m128i *)(packed + c / 2),
                                 _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
        }
    }
    return 1;
}

KT_TARGET_AVX2 int kt_groups_avx2(int bits, int64_t group, int rounding, const uint8_t *row, int64_t k, uint8_t *packed,
                                  uint16_t *scale) {
    if (bits == 4 && rounding == KTQ_LIBRARY) return row_of(4, KTQ_LIBRARY, group, row, k, packed, scale);
    if (bits == 4) return row_of(4, KTQ_FLOAT32, group, row, k, packed, scale);
    if (rounding == KTQ_LIBRARY) return row_of(8, KTQ_LIBRARY, group, row, k, packed, scale);
    return row_of(8, KTQ_FLOAT32, group, row, k, packed, scale);
}
