/* MXFP4 to BF16, AVX2. vpshufb looks up the lower and the upper bytes of 16 values; where an index is 0, so is what it
 * finds. */
#include <immintrin.h>

#include "kernels.h"

KT_TARGET_AVX2 int kt_panel_mxfp4_avx2(const uint8_t *codes, const uint8_t *scales, int64_t columns, uint16_t *panel,
                                       float *scale) {
    const __m256i lower = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0, (char)0x80, (char)0xc0, 0, 0x40, (char)0x80, (char)0xc0, 0, 0, (char)0x80, (char)0xc0, 0,
                      0x40, (char)0x80, (char)0xc0));
    const __m256i upper = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, (char)0x80, (char)0xbf, (char)0xbf, (char)0xbf,
                      (char)0xc0, (char)0xc0, (char)0xc0, (char)0xc0));
    for (int64_t i = 0; i < columns * KT_STRIP_ROWS; i += 128)
        for (int v = 0; v < 2; v++) {
            __m256i words = _mm256_loadu_si256((const __m256i *)(codes + i / 2 + v * 32));
            _mm_prefetch((const char *)codes + KT_PANEL_AHEAD + i / 4, _MM_HINT_T0);
            for (int g = 0; g < 4; g++, words = _mm256_srli_epi16(words, 4)) {
                __m256i code = _mm256_and_si256(words, _mm256_set1_epi16(15));
                __m256i above = _mm256_shuffle_epi8(upper, _mm256_slli_epi16(code, 8));
                _mm256_storeu_si256((__m256i *)(panel + i + g * 32 + v * 16),
                                    _mm256_or_si256(above, _mm256_shuffle_epi8(lower, code)));
            }
        }
    __m256i zeros = _mm256_setzero_si256();
    for (int64_t i = 0; i < columns; i += 8) {
        __m256i exponents = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(scales + i)));
        zeros = _mm256_or_si256(zeros, _mm256_cmpeq_epi32(exponents, _mm256_setzero_si256()));
        _mm256_storeu_si256((__m256i *)(scale + i), _mm256_slli_epi32(exponents, 23));
    }
    return _mm256_movemask_epi8(zeros) != 0;
}
