/* Allocates the memory of a training forward or backward: sorted tokens, ranges, workers' scratch, and the rows that
 * steps pass to each other. */
#include <string.h>

#include "train.h"

enum { X_GRADIENT_BUDGET = 16 << 20, LEAST_SECTION = 128 };

static int64_t *allocate_sorting(kt_training *t, kt_arena *arena) {
    int64_t *place;
    KT_ALLOCATE(place, t->moe->experts);
    KT_ALLOCATE(t->pass.bucket, t->moe->experts);
    KT_ALLOCATE(t->pass.pair, t->call->tokens * t->call->topk);
    return place;
}

static void allocate_codes(const kt_training *t, kt_int8_rows *codes, int64_t k, kt_arena *arena) {
    int64_t rows = t->pass.rows + KT_MAX_TILE_ROWS * (t->pass.buckets + t->pass.rows / KT_TOKEN_BLOCK);
    KT_ALLOCATE(codes->q, rows * k);
    KT_ALLOCATE(codes->scale, rows);
    KT_ALLOCATE(codes->sums, rows * kt_ceil_divide(k, KT_K_BLOCK));
}

static int64_t larger(int64_t x, int64_t y) {
    return x > y ? x : y;
}

static void allocate_scratch(const kt_training *t, kt_train_scratch *s, kt_arena *arena) {
    int64_t longest = larger(t->moe->hidden, t->columns),
            padded = kt_ceil_divide(t->largest, KT_PANEL_ROWS) * KT_PANEL_ROWS;
    int64_t rank = t->lora ? kt_ceil_divide(t->lora->rank, KT_PANEL_ROWS) * KT_PANEL_ROWS : 0;
    int64_t rank_columns = 2 * rank * t->moe->slices, panels = larger(2 * KT_STEP_PANELS, rank / KT_PANEL_ROWS);
    int64_t block = KT_TOKEN_BLOCK * KT_PANEL_ROWS, c = larger(panels * block, rank_columns * KT_PANEL_ROWS);
    int64_t transposed = KT_STEP_PANELS * KT_PANEL_ROWS * larger(t->moe->hidden, 2 * t->width);
    if (t->lora) {
        int64_t rows = larger(larger(KT_PANEL_ROWS, rank) * longest, KT_PANEL_ROWS * (padded + 1));
        KT_ALLOCATE(s->rows, rows);
        KT_ALLOCATE(s->panels, larger(rows, KT_PANEL_ROWS * 2 * rank));
        KT_ALLOCATE(s->token_rows, rank_columns * padded);
        if (t->lora->dropout > 0) transposed = larger(transposed, KT_TOKEN_BLOCK * longest);
    }
    KT_ALLOCATE(s->transposed, transposed);
    KT_ALLOCATE(s->chunk, 2 * KT_STEP_PANELS * KT_PANEL_ROWS * KT_PANEL_ROWS);
    KT_ALLOCATE(s->rounded, larger(block, 2 * rank * KT_PANEL_ROWS)); /* a factor's gradient needs floats */
    KT_ALLOCATE(s->c, c);
    KT_ALLOCATE(s->lora_product, larger(block, t->moe->hidden));
    KT_ALLOCATE(s->products, t->moe->hidden);
    KT_ALLOCATE(s->derivative, 4 * KT_TOKEN_BLOCK * KT_PANEL_ROWS);
    KT_ALLOCATE(s->acc, KT_STEP_PANELS * (KT_TOKEN_BLOCK + KT_MAX_TILE_ROWS) * KT_PANEL_ROWS);
    KT_ALLOCATE(s->gemm, KT_GEMM_SCRATCH);
}

static void allocate(kt_training *t, int workers, kt_arena *arena) {
    int64_t rows = t->pass.rows, hidden = t->moe->hidden;
    allocate_sorting(t, arena);
    KT_ALLOCATE(t->ranges, kt_max_ranges(t));
    KT_ALLOCATE(t->row_pair, rows);
    KT_ALLOCATE(t->block, t->pass.buckets);
    KT_ALLOCATE(t->scratch, workers);
    for (int i = 0; i < workers; i++) {
        kt_train_scratch none;
        allocate_scratch(t, arena->base ? &t->scratch[i] : &none, arena);
    }
    KT_ALLOCATE(t->x, rows * hidden);
    if (t->gradients ? kt_quantizes_gradients(t) : kt_uses_int8(t)) {
        allocate_codes(t, &t->x8, hidden, arena);
        for (int64_t slice = 0; slice < t->moe->slices; slice++) {
            allocate_codes(t, &t->act8[slice], t->moe->width[slice], arena);
            if (t->gradients) allocate_codes(t, &t->up8[slice], t->moe->width[slice], arena);
        }
    }
    if (!t->gradients) return;
    KT_ALLOCATE(t->gradient, rows * hidden);
    KT_ALLOCATE(t->gate_gradient, rows * t->columns);
    KT_ALLOCATE(t->up_gradient, rows * t->columns);
    KT_ALLOCATE(t->x_gradient, rows * t->section_columns);
    for (int i = 0; t->lora && i < KT_PROJECTIONS; i++) KT_ALLOCATE(t->rank_gradient[i], rows * 2 * t->rank_columns);
}

int kt_sort_and_allocate(ktq_pool *pool, kt_training *t) {
    int workers = kt_pool_workers(pool);
    kt_arena needed = {0};
    allocate_sorting(t, &needed);
    kt_arena first = {.base = kt_pool_memory(pool, needed.used, 0)};
    if (!first.base) return KTQ_ENOMEM;
    kt_sort_tokens(&t->pass, allocate_sorting(t, &first));
    kt_unpoison_gaps(&first);
    t->largest = t->pass.buckets ? t->pass.bucket[0].m : 0;
    int64_t columns =
        X_GRADIENT_BUDGET / (int64_t)sizeof(float) / larger(t->pass.rows, 1) / LEAST_SECTION * LEAST_SECTION;
    t->section_columns = columns < LEAST_SECTION ? LEAST_SECTION : columns;
    if (t->section_columns > t->moe->hidden) t->section_columns = t->moe->hidden;

    needed = (kt_arena){0};
    kt_training copy = *t;
    allocate(&copy, workers, &needed);
    kt_arena whole = {.base = kt_pool_memory(pool, needed.used, first.used)}; /* begins with the sorted tokens */
    if (!whole.base) return KTQ_ENOMEM;
    allocate(t, workers, &whole);
    for (int64_t i = 0; i < t->call->tokens * t->call->topk; i++)
        if (t->pass.pair[i].row >= 0) t->row_pair[t->pass.pair[i].row] = i;
    for (int64_t b = 0, blocks = 0; b < t->pass.buckets; b++) {
        t->block[b] = blocks;
        blocks += kt_ceil_divide(t->pass.bucket[b].m, KT_TOKEN_BLOCK);
    }
    kt_unpoison_gaps(&whole);
    return KTQ_OK;
}
