/* AVX2: 16 values to a register, vpmaxuw without the sign; four chains hide its latency. The caller guarantees
 * that k is a multiple of 64. */
#include <immintrin.h>

#include "kernels.h"

KT_TARGET_AVX2 static inline __m256i magnitude(const uint8_t *p) {
    return _mm256_and_si256(_mm256_loadu_si256((const __m256i *)p), _mm256_set1_epi16(0x7fff));
}

KT_TARGET_AVX2 uint16_t kt_amax_avx2(const uint8_t *row, int64_t k) {
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    for (int64_t i = 0; i < k; i += 64) {
        a = _mm256_max_epu16(a, magnitude(row + 2 * i));
        b = _mm256_max_epu16(b, magnitude(row + 2 * i + 32));
        c = _mm256_max_epu16(c, magnitude(row + 2 * i + 64));
        d = _mm256_max_epu16(d, magnitude(row + 2 * i + 96));
    }
    a = _mm256_max_epu16(_mm256_max_epu16(a, b), _mm256_max_epu16(c, d));
    __m128i x = _mm_max_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    /* vphminposuw finds the minimum of 8: of the complements. */
    return (uint16_t)~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(x, _mm_set1_epi16(-1))), 0);
}
