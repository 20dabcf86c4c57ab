/* AVX-512 BW: 32 values to a register, vpmaxuw without the sign; four chains hide its latency. The caller guarantees
 * that k is a multiple of 64. */
#include <immintrin.h>

#include "kernels.h"

KT_TARGET_AVX512 static inline __m512i magnitude(const uint8_t *p) {
    return _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi16(0x7fff));
}

KT_TARGET_AVX512 uint16_t kt_amax_avx512(const uint8_t *row, int64_t k) {
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    int64_t i = 0;
    for (; i + 128 <= k; i += 128) {
        a = _mm512_max_epu16(a, magnitude(row + 2 * i));
        b = _mm512_max_epu16(b, magnitude(row + 2 * i + 64));
        c = _mm512_max_epu16(c, magnitude(row + 2 * i + 128));
        d = _mm512_max_epu16(d, magnitude(row + 2 * i + 192));
    }
    if (i < k) {
        a = _mm512_max_epu16(a, magnitude(row + 2 * i));
        b = _mm512_max_epu16(b, magnitude(row + 2 * i + 64));
    }
    a = _mm512_max_epu16(_mm512_max_epu16(a, b), _mm512_max_epu16(c, d));
    __m256i y = _mm256_max_epu16(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
    __m128i x = _mm_max_epu16(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
    /* vphminposuw finds the minimum of 8: of the complements. */
    return (uint16_t)~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(x, _mm_set1_epi16(-1))), 0);
}
