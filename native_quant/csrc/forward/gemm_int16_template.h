/* Products of int16 with many tokens (gemm_int16.h): a pair of columns of as many rows as a vector has words at a time.
 * A file that includes this must define BLOCK, the most tokens whose sums fit into registers, BLOCKS(X), which is
 * X(1) .. X(BLOCK), and add_products(sum, weights, pairs): the sums with those of both products of each pair. */
#include "find_most_template.h"
#include "gemm_int16.h"

enum { PASSES = KT_PANEL_ROWS / AT_ONCE };

/* Multiplies wide * KT_SUM_COLUMNS columns of rows from `first` on, with independent sums. Meanwhile prefetches `bytes`
   bytes. */
__attribute__((always_inline)) TARGET static inline void
multiply_columns(int wide, int tokens, const uint8_t *chunk, const float *scale, int64_t scale_step,
                 const kt_int16_row *row, int64_t column, int first, float *c, const uint8_t *prefetch, int64_t bytes) {
    const int16_t *a = row->a + column;
    const float *unit = row->unit + column / KT_SUM_COLUMNS;
    ints sum[4][BLOCK][2];
    for (int64_t i = 0; i < bytes; i += 64) fetch(prefetch + i);
#pragma GCC unroll 4
    for (int w = 0; w < wide; w++)
#pragma GCC unroll 12
        for (int t = 0; t < tokens; t++) sum[w][t][0] = sum[w][t][1] = setzero_si();
    chunk += first / KT_HALF_ROWS * KT_HALF_BYTES;
#pragma GCC unroll 16
    for (int pair = 0; pair < KT_SUM_COLUMNS / 2; pair++, chunk += 64, a += 2)
#pragma GCC unroll 4
        for (int w = 0; w < wide; w++) {
            const uint8_t *place = chunk + w * KT_TILE_BYTES;
            const ints weights[2] = {loadu_si(place), loadu_si(place + (PASSES == 1 ? KT_HALF_BYTES : VECTOR_BYTES))};
#pragma GCC unroll 12
            for (int t = 0; t < tokens; t++) {
                int32_t two;
                memcpy(&two, a + t * (int64_t)(sizeof *row / sizeof *a) + w * KT_SUM_COLUMNS, sizeof two);
                const ints pairs = set1_epi32(two);
#pragma GCC unroll 2
                for (int v = 0; v < 2; v++) sum[w][t][v] = add_products(sum[w][t][v], weights[v], pairs);
            }
        }
#pragma GCC unroll 12
    for (int t = 0; t < tokens; t++)
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
            const int r = first + v * LANES;
            floats total = load_ps(c + t * KT_PANEL_ROWS + r);
#pragma GCC unroll 4
            for (int w = 0; w < wide; w++) {
                floats product = mul_ps(cvtepi32_ps(sum[w][t][v]), set1_ps(unit[t * (int64_t)(sizeof *row / 4) + w]));
                total = fmadd_ps(loadu_ps(scale + w * scale_step + r), product, total);
            }
            store_ps(c + t * KT_PANEL_ROWS + r, total);
        }
}

__attribute__((always_inline)) TARGET static inline void block(int tokens, const kt_bf16_block *work) {
    const int wide = tokens <= BLOCK / 6   ? 4
                     : tokens <= BLOCK / 2 ? 2
                                           : 1; /* enough sums to hide the latency of additions */
    const uint8_t *prefetch = work->prefetch;
    for (int64_t j = 0, at_once; j < work->columns; j += at_once) {
        at_once = work->columns - j < wide * KT_SUM_COLUMNS ? KT_SUM_COLUMNS : wide * KT_SUM_COLUMNS;
        const int64_t bytes = work->step * at_once / (2 * PASSES);
        for (int first = 0; first < KT_PANEL_ROWS; first += AT_ONCE, prefetch += bytes) {
            const uint8_t *weights = work->chunk + j * 64;
            const float *scale = work->scale + j / KT_SUM_COLUMNS * work->scale_step;
            if (at_once > KT_SUM_COLUMNS)
                multiply_columns(wide, tokens, weights, scale, work->scale_step, work->a, j, first, work->c, prefetch,
                                 bytes);
            else
                multiply_columns(1, tokens, weights, scale, work->scale_step, work->a, j, first, work->c, prefetch,
                                 bytes);
        }
    }
}

#include "gemm_bf16_blocks.h"

TARGET static inline float find_unit(const uint16_t *a) {
    return kt_int16_unit(find_most(a));
}

/* Rounds LANES activations to units. */
TARGET static inline ints round_to_units(const uint16_t *a, floats reciprocal) {
    return cvtps_epi32(mul_ps(castsi_ps(slli_epi32(load_epu16_epi32(a), 16)), reciprocal));
}

/* AT_ONCE of them, as int16. */
TARGET static inline ints to_int16(const uint16_t *a, floats reciprocal) {
    return after_pack(packs_epi32(round_to_units(a, reciprocal), round_to_units(a + LANES, reciprocal)));
}

TARGET static void copy(const uint16_t *a, int64_t columns, void *out) {
    kt_int16_row *row = out;
    for (int64_t j = 0; j < columns; j += KT_SUM_COLUMNS) {
        const float unit = row->unit[j / KT_SUM_COLUMNS] = find_unit(a + j);
        const floats reciprocal = set1_ps(kt_int16_reciprocal(unit));
        for (int64_t i = j; i < j + KT_SUM_COLUMNS; i += AT_ONCE) storeu_si(row->a + i, to_int16(a + i, reciprocal));
    }
}

static const kt_bf16_steps steps = {
    BLOCK, 1, sizeof(int16_t), sizeof(kt_int16_row), copy, run_block, KT_IN_ORDER_COLUMNS, {{NULL}},
};
