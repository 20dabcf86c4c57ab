/* silu(gate) * up, rounded to BF16, 16 rows at a time. */
#include "outputs_avx2.h"

/* 8 rows: each in 32 bits. */
KT_TARGET_AVX2 static inline __m256i rounded(const float *gate, const float *up) {
    __m256 h = _mm256_mul_ps(kt_silu(_mm256_loadu_ps(gate)), _mm256_loadu_ps(up));
    return _mm256_srli_epi32(kt_bf16_above(h), 16);
}

KT_TARGET_AVX2 void kt_swiglu_bf16_avx2(int64_t m, const float *gate, const float *up, uint16_t *out,
                                        int64_t out_pitch) {
    for (int64_t t = 0; t < m; t++, gate += KT_STRIP_ROWS, up += KT_STRIP_ROWS, out += out_pitch)
        for (int64_t r = 0; r < KT_STRIP_ROWS; r += 16) {
            __m256i packed = _mm256_packus_epi32(rounded(gate + r, up + r), rounded(gate + r + 8, up + r + 8));
            _mm256_storeu_si256((__m256i *)(out + r), _mm256_permute4x64_epi64(packed, 0xd8)); /* lanes in order */
        }
}
