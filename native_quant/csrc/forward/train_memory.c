/* The memory of a forward or backward of training: sorted tokens, slices, scratch of workers, rows between steps. */
#include <string.h>

#include "train.h"

enum { OF_X_BUDGET = 16 << 20, LEAST_SECTION = 128 };

static int64_t *allocate_sorting(kt_training *t, kt_arena *arena) {
    int64_t *place;
    KT_TAKE(place, t->moe->experts);
    KT_TAKE(t->pass.bucket, t->moe->experts);
    KT_TAKE(t->pass.pair, t->call->tokens * t->call->topk);
    return place;
}

static void allocate_codes(const kt_training *t, kt_codes8 *codes, int64_t k, kt_arena *arena) {
    int64_t rows = t->pass.rows + KT_MOST_TILE_ROWS * (t->pass.buckets + t->pass.rows / KT_TOKEN_BLOCK);
    KT_TAKE(codes->q, rows * k);
    KT_TAKE(codes->scale, rows);
    KT_TAKE(codes->sums, rows * kt_blocks(k, KT_K_BLOCK));
}

static int64_t larger(int64_t x, int64_t y) {
    return x > y ? x : y;
}

static void allocate_scratch(const kt_training *t, kt_train_scratch *s, kt_arena *arena) {
    int64_t longest = larger(t->moe->hidden, t->columns), padded = kt_blocks(t->largest, KT_PANEL_ROWS) * KT_PANEL_ROWS;
    int64_t rank = t->lora ? kt_blocks(t->lora->rank, KT_PANEL_ROWS) * KT_PANEL_ROWS : 0;
    int64_t lows = 2 * rank * t->moe->parts, panels = larger(2 * KT_TURNED, rank / KT_PANEL_ROWS);
    int64_t block = KT_TOKEN_BLOCK * KT_PANEL_ROWS, c = larger(panels * block, lows * KT_PANEL_ROWS);
    int64_t turned = KT_TURNED * KT_PANEL_ROWS * larger(t->moe->hidden, 2 * t->width);
    if (t->lora) {
        int64_t rows = larger(larger(KT_PANEL_ROWS, rank) * longest, KT_PANEL_ROWS * (padded + 1));
        KT_TAKE(s->rows, rows);
        KT_TAKE(s->panels, larger(rows, KT_PANEL_ROWS * 2 * rank));
        KT_TAKE(s->low, lows * padded);
        if (t->lora->dropout > 0) turned = larger(turned, KT_TOKEN_BLOCK * longest);
    }
    KT_TAKE(s->turned, turned);
    KT_TAKE(s->chunk, 2 * KT_TURNED * KT_PANEL_ROWS * KT_PANEL_ROWS);
    KT_TAKE(s->rounded, larger(block, 2 * rank * KT_PANEL_ROWS)); /* or as many floats of a factor's gradient */
    KT_TAKE(s->c, c);
    KT_TAKE(s->of_lora, larger(block, t->moe->hidden));
    KT_TAKE(s->products, t->moe->hidden);
    KT_TAKE(s->acc, KT_TURNED * (KT_TOKEN_BLOCK + KT_MOST_TILE_ROWS) * KT_PANEL_ROWS);
    KT_TAKE(s->zeros, KT_TOKEN_BLOCK);
    KT_TAKE(s->gemm, KT_GEMM_SCRATCH);
    if (arena->base) memset(s->zeros, 0, KT_TOKEN_BLOCK * sizeof *s->zeros);
}

static void allocate(kt_training *t, int workers, kt_arena *arena) {
    int64_t rows = t->pass.rows, hidden = t->moe->hidden;
    allocate_sorting(t, arena);
    KT_TAKE(t->slice, kt_most_slices(t));
    KT_TAKE(t->pair_of, rows);
    KT_TAKE(t->block, t->pass.buckets);
    KT_TAKE(t->scratch, workers);
    for (int i = 0; i < workers; i++) {
        kt_train_scratch none;
        allocate_scratch(t, arena->base ? &t->scratch[i] : &none, arena);
    }
    KT_TAKE(t->x, rows * hidden);
    if (t->gradients ? kt_quantizes_gradients(t) : kt_in_int8(t)) {
        allocate_codes(t, &t->x8, hidden, arena);
        for (int64_t part = 0; part < t->moe->parts; part++) {
            allocate_codes(t, &t->act8[part], t->moe->width[part], arena);
            if (t->gradients) allocate_codes(t, &t->up8[part], t->moe->width[part], arena);
        }
    }
    if (!t->gradients) return;
    KT_TAKE(t->gradient, rows * hidden);
    KT_TAKE(t->of_gate, rows * t->columns);
    KT_TAKE(t->of_up, rows * t->columns);
    KT_TAKE(t->of_x, rows * t->section_columns);
    for (int i = 0; t->lora && i < KT_PROJECTIONS; i++) KT_TAKE(t->of_low[i], rows * 2 * t->low);
}

int kt_sort_and_allocate(ktq_pool *pool, kt_training *t) {
    int workers = kt_pool_workers(pool);
    kt_arena counted = {0};
    allocate_sorting(t, &counted);
    kt_arena first = {.base = kt_pool_block(pool, counted.used, 0)};
    if (!first.base) return KTQ_ENOMEM;
    kt_sort_tokens(&t->pass, allocate_sorting(t, &first));
    kt_open_gaps(&first);
    t->largest = t->pass.buckets ? t->pass.bucket[0].m : 0;
    int64_t columns = OF_X_BUDGET / (int64_t)sizeof(float) / larger(t->pass.rows, 1) / LEAST_SECTION * LEAST_SECTION;
    t->section_columns = columns < LEAST_SECTION ? LEAST_SECTION : columns;
    if (t->section_columns > t->moe->hidden) t->section_columns = t->moe->hidden;

    counted = (kt_arena){0};
    kt_training copy = *t;
    allocate(&copy, workers, &counted);
    kt_arena whole = {.base = kt_pool_block(pool, counted.used, first.used)}; /* begins with the sorted tokens */
    if (!whole.base) return KTQ_ENOMEM;
    allocate(t, workers, &whole);
    for (int64_t i = 0; i < t->call->tokens * t->call->topk; i++)
        if (t->pass.pair[i].row >= 0) t->pair_of[t->pass.pair[i].row] = i;
    for (int64_t b = 0, blocks = 0; b < t->pass.buckets; b++) {
        t->block[b] = blocks;
        blocks += kt_blocks(t->pass.bucket[b].m, KT_TOKEN_BLOCK);
    }
    kt_open_gaps(&whole);
    return KTQ_OK;
}
