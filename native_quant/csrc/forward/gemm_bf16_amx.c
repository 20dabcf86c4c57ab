/* Products of BF16 in AMX tiles, in the order of tdpbf16ps (numerics.md, section 5b). A chunk's blocks of columns are
 * tiles as they are stored. Any number of tokens goes this way, even one, so that a token's bits do not depend on it.
 *
 * Up to 16 tokens: one tile of activations, with as many rows. Up to 32: two, both full: the second one ends with the
 * last token, and what both give for the same token is the same. Tiles are configured once for a job, because that
 * takes as long as a dozen products. 4 products for 4 loads then hide the loads, as with int8 (gemm_amx.h).
 *
 * Sums leave their tiles to be scaled: with 32 columns a sum 4 stores of a tile, 16 cycles each, for 4 products of 16
 * cycles; with 128 columns, one store for each 4 products. Two sums of a row are scaled at a time, so that y is loaded
 * and stored half as often. Together with a chunk and its activations they stay in 48 KiB of L1. */
#include <string.h>

#include "gemm_bf16_steps.h"
#include "gemm_tiles_amx.h"

enum {
    BLOCK = 2 * KT_TILE_TOKENS,
    PITCH = KT_CHUNK_COLUMNS * 2, /* bytes from token to token */
    TOGETHER = 2,                 /* sums of a row that are scaled at a time */
};

/* The products of columns first .., added up in tiles. out: [token][32 rows]. */
KT_INLINE KT_TARGET_AMX void add_up(int two, const kt_bf16_block *work, int64_t first, int64_t columns, float *out) {
    const int64_t second = work->tokens - KT_TILE_TOKENS, fetched = work->step * (KT_SUM_COLUMNS / 2);
    kt_zero_sums(two);
    for (int64_t j = first; j < first + columns; j += KT_SUM_COLUMNS) {
        const uint16_t *a = (const uint16_t *)work->a + j;
        const uint8_t *weights = work->chunk + j * 64, *prefetch = work->prefetch + work->step * (j / 2);
        KT_TILE_LOAD(0, a, PITCH);
        KT_TILE_LOAD(2, weights, 64);
        KT_TILE_MULTIPLY_BF16(4, 0, 2);
        KT_TILE_LOAD(3, weights + KT_HALF_BYTES, 64);
        KT_TILE_MULTIPLY_BF16(5, 0, 3);
        if (two) {
            KT_TILE_LOAD(1, a + second * KT_CHUNK_COLUMNS, PITCH);
            KT_TILE_MULTIPLY_BF16(6, 1, 2);
            KT_TILE_MULTIPLY_BF16(7, 1, 3);
        }
        for (int64_t i = 0; i < fetched; i += 64) _mm_prefetch((const char *)prefetch + i, _MM_HINT_T0);
    }
    kt_store_sums(two, out, second);
}

/* c += scale * sum, for `count` sums one after the other. */
KT_INLINE KT_TARGET_AMX void scale_and_add(int count, int64_t tokens, float (*sums)[BLOCK][KT_PANEL_ROWS],
                                           const float *scale, int64_t scale_step, float *c) {
    for (int h = 0; h < KT_PANEL_ROWS; h += KT_HALF_ROWS) {
        __m512 scales[TOGETHER];
        for (int i = 0; i < count; i++) scales[i] = _mm512_loadu_ps(scale + i * scale_step + h);
        for (int64_t t = 0; t < tokens; t++) {
            __m512 total = _mm512_load_ps(c + t * KT_PANEL_ROWS + h);
            for (int i = 0; i < count; i++)
                total = _mm512_fmadd_ps(scales[i], _mm512_load_ps(&sums[i][t][h]), total);
            _mm512_store_ps(c + t * KT_PANEL_ROWS + h, total);
        }
    }
}

KT_INLINE KT_TARGET_AMX void multiply(int two, const kt_bf16_block *work) {
    _Alignas(64) float sums[TOGETHER][BLOCK][KT_PANEL_ROWS];
    const int64_t scale_step = work->sum_columns / KT_SUM_COLUMNS * work->scale_step;
    const float *scale = work->scale;
    for (int64_t first = 0; first < work->columns;) {
        int count = 0;
        for (; count < TOGETHER && first < work->columns; count++, first += work->sum_columns) {
            int64_t remaining = work->columns - first;
            add_up(two, work, first, remaining < work->sum_columns ? remaining : work->sum_columns, sums[count][0]);
        }
        if (count == TOGETHER) scale_and_add(TOGETHER, work->tokens, sums, scale, scale_step, work->c);
        else scale_and_add(1, work->tokens, sums, scale, scale_step, work->c);
        scale += count * scale_step;
    }
}

/* A job of 16 tokens or more has no block of fewer. */
KT_TARGET_AMX static void block(const kt_bf16_block *work) {
    if (work->tokens > KT_TILE_TOKENS) multiply(1, work);
    else multiply(0, work);
}

static void copy(const uint16_t *a, int64_t columns, void *out) {
    memcpy(out, a, (size_t)columns * sizeof *a);
}

/* Tiles add up the products of as many columns as BF16 panels' sum_columns. */
enum { FEW_COLUMNS = 128 };

static const kt_bf16_steps steps = {
    BLOCK, 0, sizeof(uint16_t), KT_CHUNK_COLUMNS * sizeof(uint16_t), copy, block, FEW_COLUMNS, {{NULL}},
};

KT_TARGET_AMX void kt_gemm_bf16_amx(const kt_bf16_gemm *job) {
    kt_configure_tiles(job->m);
    kt_gemm_bf16_in_steps(job, &steps);
    KT_TILES_RELEASE();
}
