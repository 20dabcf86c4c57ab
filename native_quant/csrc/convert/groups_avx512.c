/* AVX-512: 32 columns at a time, the even and the odd ones as float32. Joined again they are, in each word of 32
 * bits, a byte of two codes (4 bits) or two bytes (8 bits). */
#include <immintrin.h>

#include "groups_row.h"

KT_TARGET_AVX512 static inline __m512i magnitude(const uint8_t *p) {
    return _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi16(0x7fff));
}

/* The largest of 32 unsigned words: vphminposuw finds the smallest of 8, so of their complements. */
KT_TARGET_AVX512 static inline uint16_t largest(__m512i words) {
    __m256i y = _mm256_max_epu16(_mm512_castsi512_si256(words), _mm512_extracti64x4_epi64(words, 1));
    __m128i x = _mm_max_epu16(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
    return (uint16_t)~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(x, _mm_set1_epi16(-1))), 0);
}

KT_TARGET_AVX512 static inline uint16_t group_amax(const uint8_t *p, int64_t group) {
    __m512i a = magnitude(p);
    for (int64_t c = 32; c < group; c += 32) a = _mm512_max_epu16(a, magnitude(p + 2 * c));
    return largest(a);
}

/* x / scale, rounded to BF16 if the library does (bf16.h: kt_to_bf16), cut to what the bits hold, and as an unsigned
   code in the lowest byte: adding 1.5 * 2^23 + 2^(bits-1) leaves no place for a fraction. */
KT_TARGET_AVX512 static inline __m512i codes(int bits, int rounding, __m512i x, __m512 scale) {
    const float offset = bits == 4 ? 8.0f : 128.0f;
    __m512 q = _mm512_div_ps(_mm512_castsi512_ps(x), scale);
    if (rounding == KTQ_LIBRARY) {
        __m512i u = _mm512_castps_si512(q);
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
        u = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
        q = _mm512_castsi512_ps(_mm512_and_si512(u, _mm512_set1_epi32((int)0xffff0000)));
    }
    q = _mm512_min_ps(_mm512_max_ps(q, _mm512_set1_ps(-offset)), _mm512_set1_ps(offset - 1.0f));
    return _mm512_castps_si512(_mm512_add_ps(q, _mm512_set1_ps(0x1.8p23f + offset)));
}

KT_TARGET_AVX512 static inline __attribute__((always_inline)) int
row_of(int bits, int rounding, int64_t group, const uint8_t *row, int64_t k, uint8_t *packed, uint16_t *scale) {
    const __m512i low = _mm512_set1_epi32(bits == 4 ? 0x0f : 0xff);
    /* All scales first: each is a chain of latencies, and those of several groups overlap. The row is in L1 the second
     * time. */
    for (int64_t g = 0; g < k / group; g++) {
        uint16_t amax = group_amax(row + 2 * g * group, group);
        if (amax >= KT_BF16_INFINITY) return 0;
        scale[g] = kt_group_scale(bits, amax);
    }
    for (int64_t g = 0; g < k / group; g++, row += 2 * group, packed += group * bits / 8) {
        const __m512 d = _mm512_set1_ps(kt_from_bf16(scale[g]));
        for (int64_t c = 0; c < group; c += 32) {
            __m512i x = _mm512_loadu_si512(row + 2 * c);
            __m512i even = codes(bits, rounding, _mm512_slli_epi32(x, 16), d);
            __m512i odd = codes(bits, rounding, _mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000)), d);
            /* 0xca: where the mask has a bit its second operand, else the third. */
            __m512i both = _mm512_ternarylogic_epi32(low, even, _mm512_slli_epi32(odd, (unsigned)bits), 0xca);
            if (bits == 4)
                _mm_storeu_si128((__m128i *)(packed + c / 2), _mm512_cvtepi32_epi8(both));
            else
                _mm256_storeu_si256((__m256i *)(packed + c), _mm512_cvtepi32_epi16(both));
        }
    }
    return 1;
}

KT_TARGET_AVX512 int kt_groups_avx512(int bits, int64_t group, int rounding, const uint8_t *row, int64_t k,
                                      uint8_t *packed, uint16_t *scale) {
    if (bits == 4 && rounding == KTQ_LIBRARY) return row_of(4, KTQ_LIBRARY, group, row, k, packed, scale);
    if (bits == 4) return row_of(4, KTQ_FLOAT32, group, row, k, packed, scale);
    if (rounding == KTQ_LIBRARY) return row_of(8, KTQ_LIBRARY, group, row, k, packed, scale);
    return row_of(8, KTQ_FLOAT32, group, row, k, packed, scale);
}
