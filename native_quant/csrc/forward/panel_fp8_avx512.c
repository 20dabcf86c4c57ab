/* FP8 E4M3 to BF16, AVX-512, 64 codes at a time: sign, exponent and fraction as they are, another bias. Codes for which
 * that is wrong are rare. */
#include <immintrin.h>

#include "kernels.h"

/* 32 codes with their sign extended. */
KT_TARGET_AVX512 static inline __m512i normal(__m512i code) {
    __m512i fields = _mm512_and_si512(_mm512_slli_epi16(code, 4), _mm512_set1_epi16((short)0x87f0));
    return _mm512_add_epi16(fields, _mm512_set1_epi16(0x3c00));
}

/* The same where some are subnormal or 0: m * 2^-9. vpermw takes the lower 5 bits of a code, here m and the sign. */
KT_TARGET_AVX512 static inline __m512i any(__m512i code) {
    const __m512i table = _mm512_castsi128_si512(
        _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    __mmask32 subnormal = _mm512_testn_epi16_mask(code, _mm512_set1_epi16(0x78));
    __m512i value = _mm512_mask_permutexvar_epi16(normal(code), subnormal, code, table);
    return _mm512_ternarylogic_epi32(value, code, _mm512_set1_epi16((short)0x8000), 0xf8); /* or, and */
}

KT_TARGET_AVX512 void kt_panel_fp8_avx512(const uint8_t *codes, int64_t columns, uint16_t *panel) {
    __mmask64 nans = 0;
    for (int64_t i = 0; i < columns * KT_STRIP_ROWS; i += 64) {
        _mm_prefetch((const char *)codes + KT_PANEL_AHEAD + i / 2, _MM_HINT_T0);
        __m512i magnitude = _mm512_and_si512(_mm512_loadu_si512(codes + i), _mm512_set1_epi8(0x7f));
        __m512i low = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(codes + i)));
        __m512i high = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(codes + i + 32)));
        /* Magnitudes of normal numbers are 8 .. 126. */
        if (_mm512_cmpge_epu8_mask(_mm512_sub_epi8(magnitude, _mm512_set1_epi8(8)), _mm512_set1_epi8(119))) {
            nans |= _mm512_cmpeq_epi8_mask(magnitude, _mm512_set1_epi8(0x7f));
            low = any(low);
            high = any(high);
        } else {
            low = normal(low);
            high = normal(high);
        }
        _mm512_storeu_si512(panel + i, low);
        _mm512_storeu_si512(panel + i + 32, high);
    }
    if (nans) kt_panel_fp8_scalar(codes, columns, panel);
}
