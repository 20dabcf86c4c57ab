/* silu(gate) * up, rounded to BF16, 16 rows at a time. */
#include "outputs_avx512.h"

KT_TARGET_AVX512 void kt_swiglu_bf16_avx512(int64_t m, const float *gate, const float *up, uint16_t *out,
                                            int64_t out_pitch) {
    for (int64_t t = 0; t < m; t++, gate += KT_STRIP_ROWS, up += KT_STRIP_ROWS, out += out_pitch)
        for (int64_t r = 0; r < KT_STRIP_ROWS; r += 16) {
            __m512 h = _mm512_mul_ps(kt_silu(_mm512_loadu_ps(gate + r)), _mm512_loadu_ps(up + r));
            __m512i rounded = _mm512_srli_epi32(kt_bf16_above(h), 16);
            _mm256_storeu_si256((__m256i *)(out + r), _mm512_cvtepi32_epi16(rounded));
        }
}
