/* The code shared by the products of BF16 of AVX-512: up to 12 tokens, 24 registers of sums. A file that includes this
 * must include vectors_avx512.h and a header with fp8_to_bf16, and define
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

/* Multiplies wide * KT_SUM_COLUMNS columns, with independent sums. */
KT_INLINE TARGET void multiply_columns(int wide, int tokens, const uint8_t *chunk, const float *scale,
                                       int64_t scale_step, const item *a, float *c, const uint8_t *prefetch,
                                       int64_t step) {
    __m512 sum[4][BLOCK][2];
#pragma GCC unroll 4
    for (int w = 0; w < wide; w++)
#pragma GCC unroll 12
        for (int t = 0; t < tokens; t++)
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) sum[w][t][h] = _mm512_setzero_ps();
    for (int pair = 0; pair < KT_SUM_COLUMNS / 2; pair++, chunk += 64, a += 2)
#pragma GCC unroll 4
        for (int w = 0; w < wide; w++, prefetch += step) {
            __m512i weights[2];
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                weights[h] = _mm512_loadu_si512(chunk + w * KT_TILE_BYTES + h * KT_HALF_BYTES);
                _mm_prefetch((const char *)prefetch + step / 2 * h, _MM_HINT_T0);
            }
#pragma GCC unroll 12
            for (int t = 0; t < tokens; t++)
#pragma GCC unroll 2
                for (int h = 0; h < 2; h++)
                    sum[w][t][h] =
                        multiply(sum[w][t][h], weights[h], a + t * KT_CHUNK_COLUMNS + w * KT_SUM_COLUMNS);
        }
#pragma GCC unroll 12
    for (int t = 0; t < tokens; t++)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            __m512 total = _mm512_load_ps(c + t * KT_PANEL_ROWS + h * KT_HALF_ROWS);
#pragma GCC unroll 4
            for (int w = 0; w < wide; w++) {
                __m512 scales = _mm512_loadu_ps(scale + w * scale_step + h * KT_HALF_ROWS);
                total = _mm512_fmadd_ps(scales, sum[w][t][h], total);
            }
            _mm512_store_ps(c + t * KT_PANEL_ROWS + h * KT_HALF_ROWS, total);
        }
}

KT_INLINE TARGET void block(int tokens, const kt_bf16_block *work) {
    const int wide = tokens <= 3 ? 4 : tokens <= 6 ? 2 : 1; /* enough sums to hide the latency of additions */
    const uint8_t *prefetch = work->prefetch;
    for (int64_t j = 0, at_once; j < work->columns; j += at_once, prefetch += work->step * at_once / 2) {
        at_once = work->columns - j < wide * KT_SUM_COLUMNS ? KT_SUM_COLUMNS : wide * KT_SUM_COLUMNS;
        const uint8_t *weights = work->chunk + j * 64;
        const float *scale = work->scale + j / KT_SUM_COLUMNS * work->scale_step;
        const item *a = (const item *)work->a + j;
        if (at_once > KT_SUM_COLUMNS)
            multiply_columns(wide, tokens, weights, scale, work->scale_step, a, work->c, prefetch, work->step);
        else multiply_columns(1, tokens, weights, scale, work->scale_step, a, work->c, prefetch, work->step);
    }
}

#define BLOCKS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12)
#include "gemm_bf16_blocks.h"

/* BF16 is read in the order of its bytes (Zen 4: 1.4 to 2.5 times as fast as other orders). Of FP8, both halves are
   read at once, for more independent sums, and 2 pairs of columns, so that the sums of 6 tokens stay in registers. */
KT_INLINE TARGET void few(int coding, int tokens, const kt_bf16_block *work) {
    const int is_fp8 = coding == KT_E4M3, halves = is_fp8 ? 2 : 1, count = is_fp8 ? 2 : 4;
    const kt_reading reads = kt_reads;
    const kt_ahead ahead = work->ahead;
    const int64_t pair_bytes = is_fp8 ? 32 : 64, half_bytes = KT_SUM_COLUMNS / 2 * pair_bytes;
    const uint8_t *codes = work->chunk;
    const float *scale = work->scale;
    for (int64_t j = 0; j < work->columns; j += KT_SUM_COLUMNS, scale += work->scale_step)
        for (int first = 0; first < 2; first += halves, codes += halves * half_bytes) {
            const item *a = (const item *)work->a + j;
            __m512 sum[KT_FEW_TOKENS][2];
#pragma GCC unroll 6
            for (int t = 0; t < tokens; t++) sum[t][0] = sum[t][1] = _mm512_setzero_ps();
#pragma GCC unroll 1
            for (int64_t at = 0; at < half_bytes; at += count * pair_bytes, a += 2 * count) {
                if (reads.in_turn)
                    kt_fetch_in_turn(reads.far && !is_fp8, ahead, codes - work->chunk + halves * at,
                                     halves * count * pair_bytes);
#pragma GCC unroll 2
                for (int h = 0; h < halves; h++) {
                    const uint8_t *place = codes + h * half_bytes + at;
                    __m512i pairs[4];
                    if (is_fp8) fp8_to_bf16(place, pairs);
#pragma GCC unroll 4
                    for (int g = 0; !is_fp8 && g < count; g++) pairs[g] = _mm512_loadu_si512(place + g * pair_bytes);
                    if (!reads.in_turn) kt_fetch_codes(coding, place, count * pair_bytes);
#pragma GCC unroll 4
                    for (int g = 0; g < count; g++)
#pragma GCC unroll 6
                        for (int t = 0; t < tokens; t++)
                            sum[t][h] = multiply(sum[t][h], pairs[g], a + t * KT_CHUNK_COLUMNS + 2 * g);
                }
            }
#pragma GCC unroll 6
            for (int t = 0; t < tokens; t++)
#pragma GCC unroll 2
                for (int h = 0; h < halves; h++) {
                    const int row = (first + h) * KT_HALF_ROWS;
                    float *c = work->c + t * KT_PANEL_ROWS + row;
                    _mm512_store_ps(c, _mm512_fmadd_ps(_mm512_loadu_ps(scale + row), sum[t][h], _mm512_load_ps(c)));
                }
        }
}

#endif
