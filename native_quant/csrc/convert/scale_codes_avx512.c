/* AVX-512: 16 values at a time. */
#include <immintrin.h>

#include "kernels.h"

KT_TARGET_AVX512 void kt_scale_codes_avx512(const kt_scale_search *search, float ratio, int8_t *codes) {
    const __m512 round = _mm512_set1_ps(KT_ROUND), most = _mm512_set1_ps(search->largest + KT_ROUND);
    const __m512 scale = _mm512_set1_ps(ratio);
    for (int64_t c = 0; c < search->k; c += 16) {
        __m512 q = _mm512_min_ps(_mm512_fmadd_ps(_mm512_load_ps(search->units + c), scale, round), most);
        __m128i code = _mm512_cvtepi32_epi8(_mm512_castps_si512(q)); /* the low bits are the integer */
        __mmask16 negative = _mm256_movepi16_mask(_mm256_loadu_si256((const __m256i *)(search->row + 2 * c)));
        code = _mm_mask_sub_epi8(code, negative, _mm_setzero_si128(), code);
        _mm_storeu_si128((__m128i *)(codes + c), code);
    }
}
