/* FP8 E4M3 to BF16, AVX2, 32 codes at a time: sign, exponent and fraction as they are, another bias. Codes for which
 * that is wrong are rare. */
#include <immintrin.h>

#include "kernels.h"

/* 16 codes with their sign extended. */
KT_TARGET_AVX2 static inline __m256i normal(__m256i code) {
    __m256i fields = _mm256_and_si256(_mm256_slli_epi16(code, 4), _mm256_set1_epi16((short)0x87f0));
    return _mm256_add_epi16(fields, _mm256_set1_epi16(0x3c00));
}

/* The same where some are subnormal or 0: m * 2^-9, the upper and the lower byte. Where vpshufb's index is 0, so is
 * what it finds. */
KT_TARGET_AVX2 static inline __m256i any(__m256i code) {
    const __m256i lower = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0, (char)0x80, (char)0xc0, 0, 0x20, 0x40, 0x60, 0, 0, 0, 0, 0, 0, 0, 0));
    const __m256i upper = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, 0, 0, 0, 0, 0, 0, 0, 0));
    __m256i fraction = _mm256_and_si256(code, _mm256_set1_epi16(7)), above = _mm256_slli_epi16(fraction, 8);
    __m256i value = _mm256_or_si256(_mm256_shuffle_epi8(lower, fraction), _mm256_shuffle_epi8(upper, above));
    value = _mm256_or_si256(value, _mm256_and_si256(code, _mm256_set1_epi16((short)0x8000)));
    __m256i exponent = _mm256_and_si256(code, _mm256_set1_epi16(0x78));
    return _mm256_blendv_epi8(normal(code), value, _mm256_cmpeq_epi16(exponent, _mm256_setzero_si256()));
}

KT_TARGET_AVX2 void kt_panel_fp8_avx2(const uint8_t *codes, int64_t columns, uint16_t *panel) {
    const __m256i nan = _mm256_set1_epi8(0x7f), least = _mm256_set1_epi8(8);
    int has_nan = 0;
    for (int64_t i = 0; i < columns * KT_STRIP_ROWS; i += 32) {
        _mm_prefetch((const char *)codes + KT_PANEL_AHEAD + i / 2, _MM_HINT_T0);
        __m256i magnitude = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(codes + i)), nan);
        __m256i low = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(codes + i)));
        __m256i high = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(codes + i + 16)));
        __m256i is_nan = _mm256_cmpeq_epi8(magnitude, nan);
        __m256i odd = _mm256_or_si256(_mm256_cmpgt_epi8(least, magnitude), is_nan);
        if (_mm256_testz_si256(odd, odd)) {
            low = normal(low);
            high = normal(high);
        } else {
            has_nan |= _mm256_movemask_epi8(is_nan);
            low = any(low);
            high = any(high);
        }
        _mm256_storeu_si256((__m256i *)(panel + i), low);
        _mm256_storeu_si256((__m256i *)(panel + i + 16), high);
    }
    if (has_nan) kt_panel_fp8_scalar(codes, columns, panel);
}
