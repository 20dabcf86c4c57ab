/* The code shared by the products of BF16 of AVX-512: up to 12 tokens, 24 registers of sums. A file that includes this
 * must define
 *
 *     TARGET       the attribute of its functions
 *     item         an activation as it is read
 *     multiply     adds to the sums of 16 rows the products of their pairs of columns with two activations, the second
 *                  column first */
#ifndef KT_GEMM_BF16_AVX512_H
#define KT_GEMM_BF16_AVX512_H

#include "gemm_avx512.h"
#include "gemm_bf16_steps.h"

enum { BLOCK = 12 }; /* tokens */

KT_INLINE TARGET void block(int tokens, const uint8_t *panel, int64_t columns, const float *scale, int64_t scale_step,
                            const item *a, float *c, const uint8_t *ahead, int64_t step) {
    for (int64_t j = 0; j < columns; j += KT_SUM_COLUMNS, scale += scale_step) {
        __m512 sum[BLOCK][2];
#pragma GCC unroll 12
        for (int t = 0; t < tokens; t++) sum[t][0] = sum[t][1] = _mm512_setzero_ps();
#pragma GCC unroll 2
        for (int pair = 0; pair < KT_SUM_COLUMNS / 2; pair++, panel += 64, a += 2, ahead += step) {
            __m512i weights[2] = {_mm512_loadu_si512(panel), _mm512_loadu_si512(panel + KT_HALF_BYTES)};
            _mm_prefetch((const char *)ahead, _MM_HINT_T0);
            _mm_prefetch((const char *)ahead + step / 2, _MM_HINT_T0);
#pragma GCC unroll 12
            for (int t = 0; t < tokens; t++)
#pragma GCC unroll 2
                for (int h = 0; h < 2; h++) sum[t][h] = multiply(sum[t][h], weights[h], a + t * KT_PANEL_COLUMNS);
        }
        panel += KT_HALF_BYTES;
        __m512 scales[2] = {_mm512_loadu_ps(scale), _mm512_loadu_ps(scale + 16)};
#pragma GCC unroll 12
        for (int t = 0; t < tokens; t++)
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                float *to = c + t * KT_STRIP_ROWS + h * KT_HALF_ROWS;
                _mm512_store_ps(to, _mm512_fmadd_ps(scales[h], sum[t][h], _mm512_load_ps(to)));
            }
    }
}

#define BLOCKS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12)
#define DEFINE(N)                                                                                                    \
    TARGET static void block_##N(const uint8_t *panel, int64_t columns, const float *scale, int64_t scale_step,     \
                                 const void *a, float *c, const uint8_t *ahead, int64_t step) {                     \
        block(N, panel, columns, scale, scale_step, a, c, ahead, step);                                             \
    }
BLOCKS(DEFINE)
#undef DEFINE
#define NAME(N) block_##N,
static kt_bf16_block_fn *const blocks[BLOCK] = {BLOCKS(NAME)};
#undef NAME
#undef BLOCKS

#endif
