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

enum { BLOCK = 12 }; /* most tokens of a block */

/* Multiplies wide * KT_SUM_COLUMNS columns of one or both halves of the rows, with independent sums. */
KT_INLINE TARGET void multiply_columns(int halves, int wide, int tokens, const uint8_t *chunk, const float *scale,
                                       int64_t scale_step, const item *a, float *c, const uint8_t *prefetch,
                                       int64_t step) {
    __m512 sum[4][BLOCK][2];
#pragma GCC unroll 4
    for (int w = 0; w < wide; w++)
#pragma GCC unroll 12
        for (int t = 0; t < tokens; t++)
#pragma GCC unroll 2
            for (int h = 0; h < halves; h++) sum[w][t][h] = _mm512_setzero_ps();
    for (int pair = 0; pair < KT_SUM_COLUMNS / 2; pair++, chunk += 64, a += 2)
#pragma GCC unroll 4
        for (int w = 0; w < wide; w++, prefetch += step / 2 * halves) {
            __m512i weights[2];
#pragma GCC unroll 2
            for (int h = 0; h < halves; h++) {
                weights[h] = _mm512_loadu_si512(chunk + w * KT_TILE_BYTES + h * KT_HALF_BYTES);
                _mm_prefetch((const char *)prefetch + step / 2 * h, _MM_HINT_T0);
            }
#pragma GCC unroll 12
            for (int t = 0; t < tokens; t++)
#pragma GCC unroll 2
                for (int h = 0; h < halves; h++)
                    sum[w][t][h] =
                        multiply(sum[w][t][h], weights[h], a + t * KT_CHUNK_COLUMNS + w * KT_SUM_COLUMNS);
        }
#pragma GCC unroll 12
    for (int t = 0; t < tokens; t++)
#pragma GCC unroll 2
        for (int h = 0; h < halves; h++) {
            __m512 total = _mm512_load_ps(c + t * KT_PANEL_ROWS + h * KT_HALF_ROWS);
#pragma GCC unroll 4
            for (int w = 0; w < wide; w++) {
                __m512 scales = _mm512_loadu_ps(scale + w * scale_step + h * KT_HALF_ROWS);
                total = _mm512_fmadd_ps(scales, sum[w][t][h], total);
            }
            _mm512_store_ps(c + t * KT_PANEL_ROWS + h * KT_HALF_ROWS, total);
        }
}

KT_INLINE TARGET void multiply_chunk(int halves, int tokens, const kt_bf16_block *work) {
    const int wide = tokens <= 3 ? 4 : tokens <= 6 ? 2 : 1; /* enough sums to hide the latency of additions */
    const uint8_t *prefetch = work->prefetch;
    for (int64_t j = 0, at_once; j < work->columns; j += at_once) {
        at_once = work->columns - j < wide * KT_SUM_COLUMNS ? KT_SUM_COLUMNS : wide * KT_SUM_COLUMNS;
        for (int h = 0; h < 2; h += halves, prefetch += work->step * at_once / 4 * halves) {
            const uint8_t *weights = work->chunk + j * 64 + h * KT_HALF_BYTES;
            const float *scale = work->scale + j / KT_SUM_COLUMNS * work->scale_step + h * KT_HALF_ROWS;
            const item *a = (const item *)work->a + j;
            float *c = work->c + h * KT_HALF_ROWS;
            if (at_once > KT_SUM_COLUMNS)
                multiply_columns(halves, wide, tokens, weights, scale, work->scale_step, a, c, prefetch, work->step);
            else multiply_columns(halves, 1, tokens, weights, scale, work->scale_step, a, c, prefetch, work->step);
        }
    }
}

/* In order is one half of the rows after the other (Zen 4, few tokens: 1.4 times as fast as both at once). */
KT_INLINE TARGET void block(int tokens, const kt_bf16_block *work) {
    if (tokens <= 6 && work->in_memory) multiply_chunk(1, tokens, work);
    else multiply_chunk(2, tokens, work);
}

#define BLOCKS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12)
#include "gemm_bf16_blocks.h"

#endif
