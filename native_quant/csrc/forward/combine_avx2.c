/* The weighted sum of a token's experts, AVX2: a block of columns stays in registers over all of them. */
#include <immintrin.h>

#include "kernels.h"

/* 8 * registers columns from `c` on. registers: a constant. */
__attribute__((always_inline)) KT_TARGET_AVX2 static inline void
combine_block(int registers, int64_t terms, const float *const *rows, const float *weights, int64_t c, float *out) {
    __m256 sum[8];
    for (int i = 0; i < registers; i++) sum[i] = _mm256_setzero_ps();
    for (int64_t t = 0; t < terms; t++) {
        const __m256 weight = _mm256_set1_ps(weights[t]);
        for (int i = 0; i < registers; i++)
            sum[i] = _mm256_fmadd_ps(_mm256_loadu_ps(rows[t] + c + 8 * i), weight, sum[i]);
    }
    for (int i = 0; i < registers; i++) _mm256_storeu_ps(out + c + 8 * i, sum[i]);
}

KT_TARGET_AVX2 void kt_combine_avx2(int64_t terms, const float *const *rows, const float *weights, int64_t columns,
                                    float *out) {
    int64_t c = 0;
    for (; c + 64 <= columns; c += 64) combine_block(8, terms, rows, weights, c, out);
    for (; c < columns; c += 32) combine_block(4, terms, rows, weights, c, out);
}
