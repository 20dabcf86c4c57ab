/* The forward of a layer's routed experts: which token goes where, in which pieces, in which memory. moe_tasks.c does
 * the work, with int8 (moe_int8.c) or BF16 (moe_bf16.c) activations, as the format of the experts wants it (formats.c).
 *
 *     hidden --quantize--> a --gate·up, silu--> h --quantize--> hq --down--> y --weighted sum--> out
 *            per token       per expert and         per row        per expert    per token
 *                            panels of 32           int8 only      and panels
 *
 * Rows of a, h, hq and y are (token, expert) pairs, sorted by expert, so that an expert's tokens lie one after the
 * other. */
#include <stdlib.h>
#include <string.h>

#include "moe.h"

enum { TASKS_PER_THREAD = 8, LEAST_SECTION = 128 };
/* Bytes of a pass's rows, which bounds its tokens; and of y, which is read again soon after it was written. */
enum { ROWS_BUDGET = 256 << 20, SECTIONS_BUDGET = 16 << 20 };
/* A panel costs its bytes from memory as much as this many tokens cost work. */
enum { PANEL_COST = 16 };

int kt_check_call(const ktq_moe *moe, const ktq_call *call) {
    if (!moe || !call || !moe->expert) return KTQ_EINVAL;
    if (call->tokens < 0 || call->topk < 1 || call->topk > KTQ_MOST_TOPK) return KTQ_EINVAL;
    if (moe->experts < 1 || moe->parts < 1 || moe->parts > KTQ_MOST_PARTS) return KTQ_EINVAL;
    if (call->tokens && (!call->hidden || !call->ids || !call->weights || !call->out)) return KTQ_EINVAL;
    const kt_format *gate = kt_format_of(moe->gate_format), *up = kt_format_of(moe->up_format),
                    *down = kt_format_of(moe->down_format);
    if (!gate || !up || !down) return KTQ_EINVAL;
    if (gate->arithmetic != up->arithmetic || gate->arithmetic != down->arithmetic) return KTQ_EINVAL;
    if (gate->arithmetic != &kt_bf16_arithmetic) {
        if (gate != up || gate != down || moe->swiglu_limit || moe->swiglu_alpha) return KTQ_EINVAL;
    }
    int error = KTQ_OK;
    for (int64_t part = 0; !error && part < moe->parts; part++) {
        int64_t width = moe->width[part];
        if (gate->arithmetic != &kt_bf16_arithmetic && width != moe->width[0]) return KTQ_EINVAL;
        error = kt_check_size(gate, width, moe->hidden);
        if (!error) error = kt_check_size(up, width, moe->hidden);
        if (!error) error = kt_check_size(down, moe->hidden, width);
    }
    return error;
}

int64_t kt_widest_part(const ktq_moe *moe) {
    int64_t width = 0;
    for (int64_t part = 0; part < moe->parts; part++)
        if (moe->width[part] > width) width = moe->width[part];
    return width;
}

/* --- which token goes where --------------------------------------------------------------------------------------- */

/* Callers may change ids and skip meanwhile: each pair is read once. */
static int64_t expert_at(const kt_pass *pass, int64_t i) {
    int64_t id = __atomic_load_n(&pass->call->ids[pass->first_token * pass->call->topk + i], __ATOMIC_RELAXED);
    return id < 0 || id >= pass->moe->experts || (pass->call->skip && pass->call->skip[id]) ? -1 : id;
}

static int compare_tokens(const void *left, const void *right) {
    const kt_bucket *a = left, *b = right;
    if (a->m != b->m) return a->m < b->m ? 1 : -1;
    return a->expert < b->expert ? -1 : a->expert > b->expert;
}

void kt_sort_tokens(kt_pass *pass, int64_t *place) {
    int64_t pairs = pass->tokens * pass->call->topk;
    memset(place, 0, (size_t)pass->moe->experts * sizeof *place);
    for (int64_t i = 0; i < pairs; i++) {
        int64_t id = pass->pair[i].bucket = expert_at(pass, i);
        if (id >= 0) place[id]++;
    }
    pass->buckets = 0;
    for (int64_t id = 0; id < pass->moe->experts; id++)
        if (place[id]) pass->bucket[pass->buckets++] = (kt_bucket){.expert = id, .m = place[id]};
    qsort(pass->bucket, (size_t)pass->buckets, sizeof *pass->bucket, compare_tokens);
    pass->rows = 0;
    for (int64_t b = 0; b < pass->buckets; b++) {
        kt_bucket *bucket = &pass->bucket[b];
        place[bucket->expert] = b;
        bucket->first = pass->rows;
        pass->rows += bucket->m;
        bucket->m = 0; /* counted again below */
    }
    for (int64_t i = 0; i < pairs; i++) {
        kt_pair *pair = &pass->pair[i];
        if (pair->bucket < 0) {
            pair->row = -1;
            continue;
        }
        pair->bucket = place[pair->bucket];
        kt_bucket *bucket = &pass->bucket[pair->bucket];
        pair->row = bucket->first + bucket->m++;
    }
}

/* --- in which pieces ---------------------------------------------------------------------------------------------- */

static void add(kt_group *group, kt_task task) {
    group->task[group->tasks++] = task;
}

/* The number of a bucket's panels in one task: as many as give each thread about TASKS_PER_THREAD tasks. */
static int64_t panels_per_task(const kt_pass *pass, int64_t m, int64_t panels, int64_t threads, int64_t most) {
    double all = 0;
    for (int64_t b = 0; b < pass->buckets; b++) all += (double)panels * (double)(pass->bucket[b].m + PANEL_COST);
    int64_t count = (int64_t)(all / (double)(threads * TASKS_PER_THREAD) / (double)(m + PANEL_COST));
    return count < 1 ? 1 : count > most ? most : count;
}

static void add_down(const kt_pass *pass, kt_group *group, int64_t section, int64_t threads) {
    int64_t columns = pass->moe->hidden - section * pass->section_columns;
    int64_t panels = (columns < pass->section_columns ? columns : pass->section_columns) / KT_PANEL_ROWS;
    for (int64_t part = 0; part < group->parts; part++)
        for (int64_t b = 0; b < pass->buckets; b++) {
            int64_t step = panels_per_task(pass, pass->bucket[b].m, panels * group->parts, threads, KT_MAX_PANELS);
            for (int64_t s = 0; s < panels; s += step, group->down_left[section]++)
                add(group, (kt_task){KT_DOWN, (int)part, b, section, s, panels - s < step ? panels - s : step});
        }
}

static void add_combine(const kt_pass *pass, kt_group *group, int64_t section, int64_t threads) {
    int64_t step = kt_blocks(pass->tokens, threads);
    if (step > KT_ROW_BLOCK) step = KT_ROW_BLOCK;
    for (int64_t t = 0; t < pass->tokens; t += step, group->combine_left[section]++)
        add(group, (kt_task){KT_COMBINE, 0, 0, section, t, pass->tokens - t < step ? pass->tokens - t : step});
}

static void plan_group(const kt_pass *pass, kt_group *group, int64_t threads) {
    int64_t widest = pass->width / KT_PANEL_ROWS;
    group->threads = threads;
    group->tasks = 0;
    group->next = 0;
    group->to_quantize = 0;
    int64_t tokens = kt_blocks(pass->tokens, threads) < KT_ROW_BLOCK ? kt_blocks(pass->tokens, threads) : KT_ROW_BLOCK;
    for (int64_t t = 0; t < pass->tokens; t += tokens, group->to_quantize++)
        add(group, (kt_task){KT_QUANTIZE, 0, 0, 0, t, pass->tokens - t < tokens ? pass->tokens - t : tokens});
    for (int64_t part = 0; part < group->parts; part++)
        for (int64_t b = 0; b < pass->buckets; b++) {
            int64_t panels = pass->moe->width[group->part[part]] / KT_PANEL_ROWS;
            int64_t step = panels_per_task(pass, pass->bucket[b].m, widest * group->parts, threads, KT_MAX_PANELS / 2);
            atomic_int *left = &group->gate_up_left[part * pass->buckets + b];
            *left = 0;
            for (int64_t s = 0; s < panels; s += step, ++*left)
                add(group, (kt_task){KT_GATE_UP, (int)part, b, 0, s, panels - s < step ? panels - s : step});
        }
    for (int64_t part = 0; pass->arithmetic->requantize && part < group->parts; part++)
        for (int64_t b = 0; b < pass->buckets; b++) {
            atomic_int *left = &group->requantize_left[part * pass->buckets + b];
            int64_t m = pass->bucket[b].m;
            *left = m <= KT_REQUANTIZED_AT_ONCE;
            for (int64_t t = 0; m > KT_REQUANTIZED_AT_ONCE && t < m; t += KT_ROW_BLOCK, ++*left)
                add(group, (kt_task){KT_REQUANTIZE, (int)part, b, 0, t, m - t < KT_ROW_BLOCK ? m - t : KT_ROW_BLOCK});
        }
    for (int64_t p = 0; p < pass->sections; p++) group->down_left[p] = group->combine_left[p] = 0;
    for (int64_t p = 0; p <= pass->sections; p++) {
        if (p < pass->sections) add_down(pass, group, p, threads);
        if (p > 0) add_combine(pass, group, p - 1, threads);
    }
}

/* An upper bound of the tasks that plan_group adds. */
static int64_t most_tasks(const kt_pass *pass, const kt_group *group) {
    int64_t cells = group->parts * pass->buckets, panels = pass->width / KT_PANEL_ROWS,
            columns = pass->moe->hidden / KT_PANEL_ROWS;
    return pass->tokens * (1 + pass->sections) + cells * (panels + columns + 1) + group->parts * pass->rows;
}

/* --- in which memory ---------------------------------------------------------------------------------------------- */

/* The memory needed before the tokens are sorted. */
static int64_t *allocate_sorting(kt_pass *pass, kt_arena *arena) {
    int64_t *place;
    KT_TAKE(place, pass->moe->experts);
    KT_TAKE(pass->bucket, pass->moe->experts);
    KT_TAKE(pass->pair, pass->tokens * pass->call->topk);
    KT_TAKE(pass->group, pass->groups);
    return place;
}

static void allocate_group(const kt_pass *pass, kt_group *group, kt_arena *arena) {
    int64_t cells = group->parts * pass->buckets;
    KT_TAKE(group->task, most_tasks(pass, group));
    KT_TAKE(group->gate_up_left, cells);
    if (pass->arithmetic->requantize) KT_TAKE(group->requantize_left, cells);
    KT_TAKE(group->down_left, pass->sections);
    KT_TAKE(group->combine_left, pass->sections);
    KT_TAKE(group->y, (pass->sections > 1 ? 2 : 1) * group->parts * pass->rows * pass->section_columns);
    pass->arithmetic->allocate(pass, group, arena);
}

static void allocate_workers(kt_pass *pass, int workers, kt_arena *arena) {
    KT_TAKE(pass->scratch, workers);
    for (int i = 0; i < workers; i++) {
        kt_worker_scratch none, *scratch = arena->base ? &pass->scratch[i] : &none;
        scratch->c = kt_take(arena, KT_MAX_PANELS * KT_MOST_SUMS * KT_PANEL_ROWS, sizeof(float));
        KT_TAKE(scratch->gemm, KT_GEMM_SCRATCH);
        KT_TAKE(scratch->sums, pass->moe->parts * pass->section_columns);
        KT_TAKE(scratch->rows, pass->call->topk);
        KT_TAKE(scratch->weights, pass->call->topk);
        KT_TAKE(scratch->place, pass->call->topk);
    }
}

/* Parts go to groups in turn. */
static int64_t parts_of_group(const kt_pass *pass, int g) {
    return kt_blocks(pass->moe->parts - g, pass->groups);
}

static void allocate(kt_pass *pass, int workers, kt_arena *arena) {
    allocate_sorting(pass, arena);
    allocate_workers(pass, workers, arena);
    for (int g = 0; g < pass->groups; g++) {
        kt_group none = {0}, *group = arena->base ? &pass->group[g] : &none;
        *group = (kt_group){.parts = parts_of_group(pass, g)};
        KT_TAKE(group->part, group->parts);
        for (int64_t i = 0; arena->base && i < group->parts; i++) group->part[i] = g + i * pass->groups;
        allocate_group(pass, group, arena);
    }
    if (pass->groups > 1) KT_TAKE(pass->partial, pass->moe->parts * pass->tokens * pass->moe->hidden);
}

/* --- the forward -------------------------------------------------------------------------------------------------- */

static void choose_sections(kt_pass *pass) {
    int64_t hidden = pass->moe->hidden, parts = parts_of_group(pass, 0), rows = pass->rows ? pass->rows : 1;
    int64_t columns = SECTIONS_BUDGET / (2 * (int64_t)sizeof(float) * parts * rows) / KT_PANEL_ROWS * KT_PANEL_ROWS;
    if (columns < LEAST_SECTION) columns = LEAST_SECTION;
    pass->section_columns = columns < hidden ? columns : hidden;
    pass->sections = kt_blocks(hidden, pass->section_columns);
}

static int run_pass(ktq_pool *pool, kt_pass *pass) {
    int workers = kt_pool_workers(pool);
    kt_arena counted = {0};
    allocate_sorting(pass, &counted);
    kt_arena first = {.base = kt_pool_block(pool, counted.used, 0)};
    if (!first.base) return KTQ_ENOMEM;
    kt_sort_tokens(pass, allocate_sorting(pass, &first));
    kt_open_gaps(&first);
    choose_sections(pass);

    counted = (kt_arena){0};
    kt_pass copy = *pass;
    allocate(&copy, workers, &counted);
    kt_arena whole = {.base = kt_pool_block(pool, counted.used, first.used)}; /* begins with the sorted tokens */
    if (!whole.base) return KTQ_ENOMEM;
    allocate(pass, workers, &whole);

    for (int g = 0; g < pass->groups; g++) plan_group(pass, &pass->group[g], kt_blocks(workers, pass->groups));
    pass->next_merge = 0;
    pass->merge_tasks = kt_blocks(pass->tokens, KT_ROW_BLOCK);
    kt_pool_run(pool, kt_moe_work, pass);
    kt_open_gaps(&whole);
    return KTQ_OK;
}

/* Tokens of a pass, so that its rows stay within ROWS_BUDGET. */
static int64_t tokens_per_pass(const ktq_moe *moe, const ktq_call *call) {
    const kt_format *down = kt_format_of(moe->down_format);
    int64_t h_bytes = down->arithmetic->h_bytes * kt_terms(down);
    int64_t row = down->arithmetic->a_bytes * moe->hidden + h_bytes * kt_widest_part(moe) * moe->parts;
    int64_t tokens = ROWS_BUDGET / row / call->topk;
    return tokens < 1 ? 1 : tokens;
}

int ktq_forward(ktq_pool *pool, const ktq_moe *moe, const ktq_call *call) {
    int error = pool ? kt_check_call(moe, call) : KTQ_EINVAL;
    if (!error) error = kt_pool_enter(pool);
    if (error) return error;
    int groups = kt_pool_groups(pool) < moe->parts ? kt_pool_groups(pool) : (int)moe->parts;
    int64_t step = tokens_per_pass(moe, call);
    for (int64_t t = 0; !error && t < call->tokens; t += step) {
        int64_t tokens = call->tokens - t < step ? call->tokens - t : step;
        kt_pass pass = {.moe = moe,
                        .gate = kt_format_of(moe->gate_format),
                        .up = kt_format_of(moe->up_format),
                        .down = kt_format_of(moe->down_format),
                        .width = kt_widest_part(moe),
                        .call = call,
                        .kernels = kt_current(),
                        .first_token = t,
                        .tokens = tokens,
                        .groups = groups};
        pass.arithmetic = pass.gate->arithmetic;
        error = run_pass(pool, &pass);
    }
    kt_pool_leave(pool);
    return error;
}
