/* AVX-512 BW: 32 values to a register, vpmaxuw without the sign; four chains hide its latency. The caller guarantees
 * that k is a multiple of 64. A maximum may count a value twice: the first and last 128 bytes are taken as they lie,
 * and what is between (or a little of them again) by whole cache lines, since tensors rarely begin on one. */
#include <immintrin.h>

#include "kernels.h"

KT_TARGET_AVX512 static inline __m512i magnitude(const uint8_t *p) {
    return _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi16(0x7fff));
}

KT_TARGET_AVX512 uint16_t kt_amax_avx512(const uint8_t *row, int64_t k) {
    const uint8_t *end = row + 2 * k;
    __m512i a = magnitude(row), b = magnitude(row + 64), c = magnitude(end - 128), d = magnitude(end - 64);
    const uint8_t *p =
        (uintptr_t)row & 1 ? row : row + (-(uintptr_t)row & 63); /* values at odd addresses stay where they are */
    for (; p + 256 <= end; p += 256) {
        a = _mm512_max_epu16(a, magnitude(p));
        b = _mm512_max_epu16(b, magnitude(p + 64));
        c = _mm512_max_epu16(c, magnitude(p + 128));
        d = _mm512_max_epu16(d, magnitude(p + 192));
    }
    for (; p + 64 <= end; p += 64) a = _mm512_max_epu16(a, magnitude(p));
    a = _mm512_max_epu16(_mm512_max_epu16(a, b), _mm512_max_epu16(c, d));
    __m256i y = _mm256_max_epu16(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
    __m128i x = _mm_max_epu16(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
    /* vphminposuw finds the minimum of 8: of the complements. */
    return (uint16_t)~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(x, _mm_set1_epi16(-1))), 0);
}
