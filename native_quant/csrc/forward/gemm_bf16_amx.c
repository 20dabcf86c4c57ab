/* Products of BF16 in AMX tiles, in the order of tdpbf16ps (numerics.md, section 5b). A chunk's blocks of columns are
 * tiles as they are stored. Any number of tokens goes this way, even one, so that a token's bits do not depend on it.
 *
 * Up to 16 tokens: one tile of activations, with as many rows. Up to 32: two, both full: the second one ends with the
 * last token, and what both give for the same token is the same. Tiles are configured once for a job, because that
 * takes as long as a dozen products. 4 products for 4 loads then hide the loads, as with int8 (gemm_amx.h).
 *
 * Sums leave their tiles to be scaled: with 32 columns a sum 4 stores of a tile, 16 cycles each, for 4 products of 16
 * cycles; with 128 columns, one store for each 4 products. Two sums of a row are scaled at a time, so that y is loaded
 * and stored half as often. Together with a chunk and its activations they stay in 48 KiB of L1.
 *
 * Activations of 8 bits are integers, which BF16 holds exactly, and each 32 columns have a unit. */
#include <string.h>

#include "gemm_tiles_amx.h"
#include "vectors_avx512.h"
#undef TARGET
#define TARGET KT_TARGET_AMX
#include "find_most_template.h"
#include "gemm_int16.h"

enum {
    BLOCK = 2 * KT_TILE_TOKENS,
    TOGETHER = 2, /* sums of a row that are scaled at a time */
};

/* A token's activations of 8 bits for the columns of a chunk. Rows of a tile are aligned. */
typedef struct {
    _Alignas(64) uint16_t a[KT_CHUNK_COLUMNS];
    float unit[KT_CHUNK_SUMS];
} int8_row;
enum { INT8_PITCH = sizeof(int8_row), BF16_PITCH = KT_CHUNK_COLUMNS * sizeof(uint16_t) };

/* The products of columns first .., added up in tiles. pitch: bytes from token to token. out: [token][32 rows]. */
KT_INLINE KT_TARGET_AMX void add_up(int two, int pitch, const kt_bf16_block *work, int64_t first, int64_t columns,
                                    float *out) {
    const int64_t second = work->tokens - KT_TILE_TOKENS, fetched = work->step * (KT_SUM_COLUMNS / 2);
    kt_zero_sums(two);
    for (int64_t j = first; j < first + columns; j += KT_SUM_COLUMNS) {
        const uint16_t *a = (const uint16_t *)work->a + j;
        const uint8_t *weights = work->chunk + j * 64, *prefetch = work->prefetch + work->step * (j / 2);
        KT_TILE_LOAD(0, a, pitch);
        KT_TILE_LOAD(2, weights, 64);
        KT_TILE_MULTIPLY_BF16(4, 0, 2);
        KT_TILE_LOAD(3, weights + KT_HALF_BYTES, 64);
        KT_TILE_MULTIPLY_BF16(5, 0, 3);
        if (two) {
            KT_TILE_LOAD(1, (const uint8_t *)a + second * pitch, pitch);
            KT_TILE_MULTIPLY_BF16(6, 1, 2);
            KT_TILE_MULTIPLY_BF16(7, 1, 3);
        }
        for (int64_t i = 0; i < fetched; i += 64) _mm_prefetch((const char *)prefetch + i, _MM_HINT_T0);
    }
    kt_store_sums(two, out, second);
}

/* c += scale * sum, for `count` sums one after the other. unit: NULL, or the first token's for each sum, which multiply
   the sums before. */
KT_INLINE KT_TARGET_AMX void scale_and_add(int count, int64_t tokens, float (*sums)[BLOCK][KT_PANEL_ROWS],
                                           const float *unit, const float *scale, int64_t scale_step, float *c) {
    for (int h = 0; h < KT_PANEL_ROWS; h += KT_HALF_ROWS) {
        __m512 scales[TOGETHER];
        for (int i = 0; i < count; i++) scales[i] = _mm512_loadu_ps(scale + i * scale_step + h);
        for (int64_t t = 0; t < tokens; t++) {
            __m512 total = _mm512_load_ps(c + t * KT_PANEL_ROWS + h);
            for (int i = 0; i < count; i++) {
                __m512 sum = _mm512_load_ps(&sums[i][t][h]);
                if (unit) sum = _mm512_mul_ps(sum, _mm512_set1_ps(unit[t * (INT8_PITCH / (int)sizeof *unit) + i]));
                total = _mm512_fmadd_ps(scales[i], sum, total);
            }
            _mm512_store_ps(c + t * KT_PANEL_ROWS + h, total);
        }
    }
}

KT_INLINE KT_TARGET_AMX void multiply(int two, int has_units, const kt_bf16_block *work) {
    _Alignas(64) float sums[TOGETHER][BLOCK][KT_PANEL_ROWS];
    const int64_t sum_columns = has_units ? KT_SUM_COLUMNS : work->sum_columns,
                  scale_step = sum_columns / KT_SUM_COLUMNS * work->scale_step;
    const int pitch = has_units ? INT8_PITCH : BF16_PITCH;
    const float *scale = work->scale, *unit = has_units ? ((const int8_row *)work->a)->unit : NULL;
    for (int64_t first = 0; first < work->columns;) {
        int count = 0;
        for (; count < TOGETHER && first < work->columns; count++, first += sum_columns) {
            int64_t remaining = work->columns - first;
            add_up(two, pitch, work, first, remaining < sum_columns ? remaining : sum_columns, sums[count][0]);
        }
        if (count == TOGETHER) scale_and_add(TOGETHER, work->tokens, sums, unit, scale, scale_step, work->c);
        else scale_and_add(1, work->tokens, sums, unit, scale, scale_step, work->c);
        scale += count * scale_step;
        if (has_units) unit += count;
    }
}

/* A job of 16 tokens or more has no block of fewer. */
KT_TARGET_AMX static void block(const kt_bf16_block *work) {
    if (work->tokens > KT_TILE_TOKENS) multiply(1, 0, work);
    else multiply(0, 0, work);
}

KT_TARGET_AMX static void block_of_units(const kt_bf16_block *work) {
    if (work->tokens > KT_TILE_TOKENS) multiply(1, 1, work);
    else multiply(0, 1, work);
}

/* Rounds to 8 bits. */
KT_TARGET_AMX static void copy_as_units(const uint16_t *a, int64_t columns, void *out) {
    int8_row *row = out;
    for (int64_t j = 0; j < columns; j += KT_SUM_COLUMNS) {
        const float unit = row->unit[j / KT_SUM_COLUMNS] = kt_int8_unit(find_most(a + j));
        const floats reciprocal = set1_ps(kt_int8_reciprocal(unit));
        for (int64_t i = j; i < j + KT_SUM_COLUMNS; i += LANES) {
            const floats x = mul_ps(castsi_ps(slli_epi32(load_epu16_epi32(a + i), 16)), reciprocal);
            store_epi32_epi16(row->a + i, srli_epi32(castps_si(round_ps(x)), 16));
        }
    }
}

static void copy(const uint16_t *a, int64_t columns, void *out) {
    memcpy(out, a, (size_t)columns * sizeof *a);
}

/* Tiles add up the products of as many columns as BF16 panels' sum_columns. */
enum { FEW_COLUMNS = 128 };

static const kt_bf16_steps
    steps = {BLOCK, 0, sizeof(uint16_t), BF16_PITCH, copy, block, FEW_COLUMNS, {{NULL}}},
    int8_steps = {BLOCK, 0, sizeof(uint16_t), INT8_PITCH, copy_as_units, block_of_units, FEW_COLUMNS, {{NULL}}};

KT_TARGET_AMX void kt_gemm_bf16_amx(const kt_bf16_gemm *job) {
    kt_configure_tiles(job->m);
    kt_gemm_bf16_in_steps(job, job->panel->integers && kt_has_int8(job) ? &int8_steps : &steps);
    KT_TILES_RELEASE();
}
