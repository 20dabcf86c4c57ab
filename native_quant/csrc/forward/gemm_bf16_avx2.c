/* Products of BF16, AVX2: 8 rows' first or second columns as float32, and fused multiply-adds. 6 tokens and 16 rows at
 * a time: 12 of 16 registers hold sums. */
#include "vectors_avx2.h"

#include "fp8_to_bf16.h"
#include "gemm_bf16_steps.h"

#define INLINE static inline __attribute__((always_inline))

enum { BLOCK = 6 }; /* most tokens of a block */

/* Adds to the sums of two times 8 rows the products of a pair of columns. a: activations of the first token. */
INLINE KT_TARGET_AVX2 void add_products(int tokens, const ints *pairs, const float *a, floats (*sum)[2]) {
#pragma GCC unroll 2
    for (int second = 1; second >= 0; second--) {
        floats weights[2];
        for (int v = 0; v < 2; v++)
            weights[v] = castsi_ps(second ? and_si(pairs[v], set1_epi32(0xffff0000)) : slli_epi32(pairs[v], 16));
#pragma GCC unroll 6
        for (int t = 0; t < tokens; t++) {
            floats x = _mm256_broadcast_ss(a + t * KT_CHUNK_COLUMNS + second);
            for (int v = 0; v < 2; v++) sum[t][v] = fmadd_ps(weights[v], x, sum[t][v]);
        }
    }
}

/* Multiplies wide * KT_SUM_COLUMNS columns of 16 rows, with independent sums. */
INLINE KT_TARGET_AVX2 void multiply_columns(int wide, int tokens, const uint8_t *half, const float *scale,
                                            int64_t scale_step, const float *a, float *c, const uint8_t *prefetch,
                                            int64_t step) {
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
            const ints pairs[2] = {loadu_si(place), loadu_si(place + 32)};
            add_products(tokens, pairs, a + w * KT_SUM_COLUMNS, sum[w]);
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

/* One half of the rows after the other, in the order of the bytes. */
INLINE KT_TARGET_AVX2 void few(int coding, int tokens, const kt_bf16_block *work) {
    const int64_t pairs_bytes = coding == KT_E4M3 ? 128 : 256; /* of 4 pairs */
    const kt_reading reads = kt_reads;
    const uint8_t *codes = work->chunk;
    const float *scale = work->scale;
    for (int64_t j = 0; j < work->columns; j += KT_SUM_COLUMNS, scale += work->scale_step)
        for (int first = 0; first < KT_PANEL_ROWS; first += KT_HALF_ROWS) {
            const float *a = (const float *)work->a + j;
            floats sum[KT_FEW_TOKENS][2];
#pragma GCC unroll 6
            for (int t = 0; t < tokens; t++) sum[t][0] = sum[t][1] = setzero_ps();
#pragma GCC unroll 1
            for (int i = 0; i < 4; i++, codes += pairs_bytes, a += 8) {
                if (!reads.in_turn) kt_fetch_codes(coding, codes, pairs_bytes);
                else
                    kt_fetch_in_turn(reads.far && coding == KT_BF16_CODES, work->ahead, codes - work->chunk,
                                     pairs_bytes);
#pragma GCC unroll 4
                for (int g = 0; g < 4; g++) {
                    ints pairs[2];
                    if (coding == KT_E4M3) fp8_to_bf16(codes + g * 32, pairs);
                    else
                        for (int v = 0; v < 2; v++) pairs[v] = loadu_si(codes + g * 64 + v * 32);
                    add_products(tokens, pairs, a + 2 * g, sum);
                }
            }
#pragma GCC unroll 6
            for (int t = 0; t < tokens; t++)
                for (int v = 0; v < 2; v++) {
                    float *c = work->c + t * KT_PANEL_ROWS + first + v * LANES;
                    store_ps(c, fmadd_ps(loadu_ps(scale + first + v * LANES), sum[t][v], load_ps(c)));
                }
        }
}

#define FEW(X) KT_UP_TO_4(X, KT_BF16_CODES) KT_UP_TO_3(X, KT_E4M3)
#include "gemm_bf16_few.h"

KT_TARGET_AVX2 static void copy(const uint16_t *a, int64_t columns, void *out) {
    for (int64_t j = 0; j < columns; j += 8) {
        __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(a + j)));
        _mm256_storeu_si256((__m256i *)((float *)out + j), _mm256_slli_epi32(words, 16));
    }
}

static const kt_bf16_steps steps = {
    BLOCK, 0, sizeof(float), KT_CHUNK_COLUMNS * sizeof(float), copy, run_block, KT_IN_ORDER_COLUMNS,
    {FEW(KT_NAME_FEW)},
};

void kt_gemm_bf16_avx2(const kt_bf16_gemm *job) {
    kt_gemm_bf16_in_steps(job, &steps);
}
