/* AVX2: 16 values to a register, vpmaxuw without the sign; four chains hide its latency. The caller guarantees that k
 * is a multiple of 64. A maximum may count a value twice: the first and last 64 bytes are taken as they lie, and what
 * is between (or a little of them again) from 32-byte boundaries, since tensors rarely begin on one. */
#include <immintrin.h>

#include "kernels.h"

KT_TARGET_AVX2 static inline __m256i magnitude(const uint8_t *p) {
    return _mm256_and_si256(_mm256_loadu_si256((const __m256i *)p), _mm256_set1_epi16(0x7fff));
}

KT_TARGET_AVX2 uint16_t kt_amax_avx2(const uint8_t *row, int64_t k) {
    const uint8_t *end = row + 2 * k;
    __m256i a = magnitude(row), b = magnitude(row + 32), c = magnitude(end - 64), d = magnitude(end - 32);
    const uint8_t *p =
        (uintptr_t)row & 1 ? row : row + (-(uintptr_t)row & 31); /* values at odd addresses stay where they are */
    for (; p + 128 <= end; p += 128) {
        a = _mm256_max_epu16(a, magnitude(p));
        b = _mm256_max_epu16(b, magnitude(p + 32));
        c = _mm256_max_epu16(c, magnitude(p + 64));
        d = _mm256_max_epu16(d, magnitude(p + 96));
    }
    for (; p + 32 <= end; p += 32) a = _mm256_max_epu16(a, magnitude(p));
    a = _mm256_max_epu16(_mm256_max_epu16(a, b), _mm256_max_epu16(c, d));
    __m128i x = _mm_max_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    /* vphminposuw finds the minimum of 8: of the complements. */
    return (uint16_t)~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(x, _mm_set1_epi16(-1))), 0);
}
