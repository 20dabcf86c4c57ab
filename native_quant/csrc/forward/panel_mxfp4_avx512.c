/* MXFP4 to BF16, AVX-512. vpermw looks up 32 codes at a time. It takes 5 bits of a word, of which the upper one belongs
 * to the next code: the table stands there twice. */
#include <immintrin.h>

#include "kernels.h"

KT_TARGET_AVX512 int kt_panel_mxfp4_avx512(const uint8_t *codes, const uint8_t *scales, int64_t columns,
                                           uint16_t *panel, float *scale) {
    const __m256i values = _mm256_setr_epi16(0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, (short)0x8000,
                                             (short)0xbf00, (short)0xbf80, (short)0xbfc0, (short)0xc000, (short)0xc040,
                                             (short)0xc080, (short)0xc0c0);
    const __m512i table = _mm512_broadcast_i64x4(values);
    for (int64_t i = 0; i < columns * KT_STRIP_ROWS; i += 128) {
        __m512i words = _mm512_loadu_si512(codes + i / 2);
        _mm_prefetch((const char *)codes + KT_PANEL_AHEAD + i / 4, _MM_HINT_T0);
        _mm512_storeu_si512(panel + i, _mm512_permutexvar_epi16(words, table));
        _mm512_storeu_si512(panel + i + 32, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table));
        _mm512_storeu_si512(panel + i + 64, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), table));
        _mm512_storeu_si512(panel + i + 96, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), table));
    }
    __mmask16 zeros = 0;
    for (int64_t i = 0; i < columns; i += 16) {
        __m512i exponents = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(scales + i)));
        zeros |= _mm512_testn_epi32_mask(exponents, exponents);
        _mm512_storeu_si512(scale + i, _mm512_slli_epi32(exponents, 23));
    }
    return zeros != 0;
}
