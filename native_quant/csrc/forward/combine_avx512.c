/* The weighted sum of a token's experts, AVX-512: a block of columns stays in registers over all of them. */
#include <immintrin.h>

#include "kernels.h"

/* 16 * registers columns from `c` on. registers: a constant. */
__attribute__((always_inline)) KT_TARGET_AVX512 static inline void
combine_block(int registers, int64_t terms, const float *const *rows, const float *weights, int64_t c, float *out) {
    __m512 sum[16];
    for (int i = 0; i < registers; i++) sum[i] = _mm512_setzero_ps();
    for (int64_t t = 0; t < terms; t++) {
        const __m512 weight = _mm512_set1_ps(weights[t]);
        for (int i = 0; i < registers; i++)
            sum[i] = _mm512_fmadd_ps(_mm512_loadu_ps(rows[t] + c + 16 * i), weight, sum[i]);
    }
    for (int i = 0; i < registers; i++) _mm512_storeu_ps(out + c + 16 * i, sum[i]);
}

KT_TARGET_AVX512 void kt_combine_avx512(int64_t terms, const float *const *rows, const float *weights, int64_t columns,
                                        float *out) {
    int64_t c = 0;
    for (; c + 256 <= columns; c += 256) combine_block(16, terms, rows, weights, c, out);
    for (; c < columns; c += 32) combine_block(2, terms, rows, weights, c, out);
}
