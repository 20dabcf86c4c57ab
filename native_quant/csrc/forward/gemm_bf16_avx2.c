/* Products of BF16, AVX2: 8 rows' first or second columns as float32, and fused multiply-adds. 6 tokens and 16 rows at
 * a time: 12 of 16 registers hold sums. */
#include <immintrin.h>

#include "gemm_bf16_steps.h"

#define TARGET KT_TARGET_AVX2
#define INLINE static inline __attribute__((always_inline))

enum { BLOCK = 6 }; /* most tokens of a block */

/* Multiplies wide * KT_SUM_COLUMNS columns of 16 rows, with independent sums. */
INLINE KT_TARGET_AVX2 void multiply_columns(int wide, int tokens, const uint8_t *half, const float *scale,
                                            int64_t scale_step, const float *a, float *c, const uint8_t *prefetch,
                                            int64_t step) {
    const __m256i second_columns = _mm256_set1_epi32((int)0xffff0000);
    __m256 sum[4][BLOCK][2];
#pragma GCC unroll 4
    for (int w = 0; w < wide; w++)
#pragma GCC unroll 6
        for (int t = 0; t < tokens; t++) sum[w][t][0] = sum[w][t][1] = _mm256_setzero_ps();
    for (int pair = 0; pair < KT_SUM_COLUMNS / 2; pair++, half += 64, a += 2)
#pragma GCC unroll 4
        for (int w = 0; w < wide; w++, prefetch += step / 2) {
            const uint8_t *place = half + w * KT_TILE_BYTES;
            _mm_prefetch((const char *)prefetch, _MM_HINT_T0);
#pragma GCC unroll 2
            for (int second = 1; second >= 0; second--) {
                __m256 weights[2];
                for (int v = 0; v < 2; v++) {
                    __m256i pairs = _mm256_loadu_si256((const __m256i *)(place + v * 32));
                    pairs = second ? _mm256_and_si256(pairs, second_columns) : _mm256_slli_epi32(pairs, 16);
                    weights[v] = _mm256_castsi256_ps(pairs);
                }
#pragma GCC unroll 6
                for (int t = 0; t < tokens; t++) {
                    __m256 x = _mm256_broadcast_ss(a + t * KT_CHUNK_COLUMNS + w * KT_SUM_COLUMNS + second);
                    for (int v = 0; v < 2; v++) sum[w][t][v] = _mm256_fmadd_ps(weights[v], x, sum[w][t][v]);
                }
            }
        }
#pragma GCC unroll 6
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < 2; v++) {
            __m256 total = _mm256_load_ps(c + t * KT_PANEL_ROWS + v * 8);
#pragma GCC unroll 4
            for (int w = 0; w < wide; w++)
                total = _mm256_fmadd_ps(_mm256_loadu_ps(scale + w * scale_step + v * 8), sum[w][t][v], total);
            _mm256_store_ps(c + t * KT_PANEL_ROWS + v * 8, total);
        }
}

INLINE KT_TARGET_AVX2 void block(int tokens, const kt_bf16_block *work) {
    const int wide = tokens == 1 ? 4 : tokens <= 3 ? 2 : 1; /* enough sums to hide the latency of additions */
    const uint8_t *prefetch = work->prefetch;
    for (int64_t j = 0, at_once; j < work->columns; j += at_once) {
        at_once = work->columns - j < wide * KT_SUM_COLUMNS ? KT_SUM_COLUMNS : wide * KT_SUM_COLUMNS;
        for (int h = 0; h < 2; h++, prefetch += work->step * at_once / 4) {
            const uint8_t *half = work->chunk + j * 64 + h * KT_HALF_BYTES;
            const float *scale = work->scale + j / KT_SUM_COLUMNS * work->scale_step + h * KT_HALF_ROWS;
            const float *a = (const float *)work->a + j;
            float *c = work->c + h * KT_HALF_ROWS;
            if (at_once > KT_SUM_COLUMNS)
                multiply_columns(wide, tokens, half, scale, work->scale_step, a, c, prefetch, work->step);
            else multiply_columns(1, tokens, half, scale, work->scale_step, a, c, prefetch, work->step);
        }
    }
}

#define BLOCKS(X) X(1) X(2) X(3) X(4) X(5) X(6)
#include "gemm_bf16_blocks.h"

KT_TARGET_AVX2 static void copy(const uint16_t *a, int64_t columns, void *out) {
    for (int64_t j = 0; j < columns; j += 8) {
        __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(a + j)));
        _mm256_storeu_si256((__m256i *)((float *)out + j), _mm256_slli_epi32(words, 16));
    }
}

static const kt_bf16_steps steps = {
    BLOCK, 0, sizeof(float), KT_CHUNK_COLUMNS * sizeof(float), copy, run_block, KT_IN_ORDER_COLUMNS,
};

void kt_gemm_bf16_avx2(const kt_bf16_gemm *job) {
    kt_gemm_bf16_in_steps(job, &steps);
}
