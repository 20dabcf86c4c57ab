/* Products of BF16, AVX2: 8 rows' first or second columns as float32, and fused multiply-adds. 6 tokens and 16 rows at
 * a time: 12 of 16 registers hold sums. */
#include <immintrin.h>

#include "gemm_bf16_steps.h"

#define INLINE static inline __attribute__((always_inline))

enum { BLOCK = 6 }; /* tokens */

INLINE KT_TARGET_AVX2 void block(int tokens, const uint8_t *panel, int64_t columns, const float *scale,
                                 int64_t scale_step, const float *a, float *c, const uint8_t *ahead, int64_t step) {
    for (int64_t j = 0; j < columns; j += KT_SUM_COLUMNS, scale += scale_step, a += KT_SUM_COLUMNS)
        for (int h = 0; h < 2; h++) {
            __m256 sum[BLOCK][2];
#pragma GCC unroll 6
            for (int t = 0; t < tokens; t++) sum[t][0] = sum[t][1] = _mm256_setzero_ps();
#pragma GCC unroll 2
            for (int pair = 0; pair < KT_SUM_COLUMNS / 2; pair++, panel += 64, ahead += step / 2) {
                __m256i weights[2];
                _mm_prefetch((const char *)ahead, _MM_HINT_T0);
                for (int v = 0; v < 2; v++) {
                    weights[v] = _mm256_loadu_si256((const __m256i *)(panel + v * 32));
                    weights[v] = _mm256_and_si256(weights[v], _mm256_set1_epi32((int)0xffff0000));
                }
#pragma GCC unroll 6
                for (int t = 0; t < tokens; t++) {
                    __m256 second = _mm256_broadcast_ss(a + t * KT_PANEL_COLUMNS + 2 * pair + 1);
                    for (int v = 0; v < 2; v++)
                        sum[t][v] = _mm256_fmadd_ps(_mm256_castsi256_ps(weights[v]), second, sum[t][v]);
                }
                for (int v = 0; v < 2; v++)
                    weights[v] = _mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)(panel + v * 32)), 16);
#pragma GCC unroll 6
                for (int t = 0; t < tokens; t++) {
                    __m256 first = _mm256_broadcast_ss(a + t * KT_PANEL_COLUMNS + 2 * pair);
                    for (int v = 0; v < 2; v++)
                        sum[t][v] = _mm256_fmadd_ps(_mm256_castsi256_ps(weights[v]), first, sum[t][v]);
                }
            }
#pragma GCC unroll 6
            for (int t = 0; t < tokens; t++)
                for (int v = 0; v < 2; v++) {
                    int row = h * KT_HALF_ROWS + v * 8;
                    float *to = c + t * KT_STRIP_ROWS + row;
                    _mm256_store_ps(to, _mm256_fmadd_ps(_mm256_loadu_ps(scale + row), sum[t][v], _mm256_load_ps(to)));
                }
        }
}

#define BLOCKS(X) X(1) X(2) X(3) X(4) X(5) X(6)
#define DEFINE(N)                                                                                             \
    KT_TARGET_AVX2 static void block_##N(const uint8_t *panel, int64_t columns, const float *scale,           \
                                         int64_t scale_step, const void *a, float *c, const uint8_t *ahead,   \
                                         int64_t step) {                                                      \
        block(N, panel, columns, scale, scale_step, a, c, ahead, step);                                       \
    }
BLOCKS(DEFINE)
#undef DEFINE
#define NAME(N) block_##N,
static kt_bf16_block_fn *const blocks[BLOCK] = {BLOCKS(NAME)};
#undef NAME

KT_TARGET_AVX2 static void copy(const uint16_t *a, int64_t columns, void *out) {
    for (int64_t j = 0; j < columns; j += 8) {
        __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(a + j)));
        _mm256_storeu_si256((__m256i *)((float *)out + j), _mm256_slli_epi32(words, 16));
    }
}

static const kt_bf16_steps steps = {BLOCK, sizeof(float), copy, blocks};

void kt_gemm_bf16_avx2(const kt_bf16_gemm *job) {
    kt_gemm_bf16_in_steps(job, &steps);
}
