/* The forward of a layer's routed experts: sorts tokens by expert, plans tasks and allocates memory. moe_tasks.c runs
 * the tasks. The experts' format (formats.c) selects int8 (moe_int8.c) or BF16 (moe_bf16.c) activations.
 *
 *     hidden --quantize--> a --gate·up, f--> h --quantize--> hq --down--> y --weighted sum--> out
 *            per token       per expert and         per row        per expert    per token
 *                            panels of 32           int8 only      and panels
 *
 * Rows of a, h, hq and y are (token, expert) pairs, sorted by expert, so that an expert's tokens are contiguous. */
#include <stdlib.h>
#include <string.h>

#include "moe.h"
#include "system/memory.h"

enum { TASKS_PER_THREAD = 8, LEAST_SECTION = 128 };
/* Limits in bytes: of a pass's rows, which limits its tokens; and of y, so that it stays in cache until it is read. */
enum { ROWS_BUDGET = 256 << 20, SECTIONS_BUDGET = 16 << 20 };
/* Reading a panel from memory takes as long as multiplying it with this many tokens. */
enum { PANEL_COST = 16 };

int kt_check_call(const ktq_moe *moe, const ktq_call *call) {
    if (!moe || !call || !moe->expert) return KTQ_EINVAL;
    if (call->tokens < 0 || call->topk < 1 || call->topk > KTQ_MAX_TOPK) return KTQ_EINVAL;
    if (moe->experts < 1 || moe->slices < 1 || moe->slices > KTQ_MAX_SLICES) return KTQ_EINVAL;
    if (call->tokens && (!call->hidden || !call->ids || !call->weights || !call->out)) return KTQ_EINVAL;
    const kt_format *gate = kt_get_format(moe->gate_format), *up = kt_get_format(moe->up_format),
                    *down = kt_get_format(moe->down_format);
    if (!gate || !up || !down || !kt_activation_of(kt_current(), moe->function.activation)) return KTQ_EINVAL;
    if (gate->arithmetic != up->arithmetic || gate->arithmetic != down->arithmetic) return KTQ_EINVAL;
    if (gate->arithmetic != &kt_bf16_arithmetic) {
        if (gate != up || gate != down) return KTQ_EINVAL;
    }
    if (call->norm && !(call->norm_epsilon > 0)) return KTQ_EINVAL;
    if (moe->missing && !moe->load) return KTQ_EINVAL;
    int error = KTQ_OK;
    for (int64_t slice = 0; !error && slice < moe->slices; slice++) {
        int64_t width = moe->width[slice];
        if (gate->arithmetic != &kt_bf16_arithmetic && width != moe->width[0]) return KTQ_EINVAL;
        error = kt_check_size(gate, width, moe->hidden);
        if (!error) error = kt_check_size(up, width, moe->hidden);
        if (!error) error = kt_check_size(down, moe->hidden, width);
    }
    return error;
}

int64_t kt_widest_slice(const ktq_moe *moe) {
    int64_t width = 0;
    for (int64_t slice = 0; slice < moe->slices; slice++)
        if (moe->width[slice] > width) width = moe->width[slice];
    return width;
}

/* --- sorting of tokens -------------------------------------------------------------------------------------------- */

/* Reads each pair only once, because callers may change ids and skip during the forward. */
static int64_t expert_at(const kt_pass *pass, int64_t i) {
    int64_t id = __atomic_load_n(&pass->call->ids[pass->first_token * pass->call->topk + i], __ATOMIC_RELAXED);
    return id < 0 || id >= pass->moe->experts || (pass->call->skip && pass->call->skip[id]) ? -1 : id;
}

static int compare_tokens(const void *left, const void *right) {
    const kt_bucket *a = left, *b = right;
    if (a->m != b->m) return a->m < b->m ? 1 : -1;
    return a->expert < b->expert ? -1 : a->expert > b->expert;
}

/* Loads the experts of the pass that are not in memory. experts: scratch for their numbers. */
static void load_missing(const kt_pass *pass, int64_t *experts) {
    const ktq_moe *moe = pass->moe;
    int64_t count = 0;
    for (int64_t b = 0; moe->missing && b < pass->buckets; b++) {
        int64_t expert = pass->bucket[b].expert;
        if (__atomic_load_n(&moe->missing[expert], __ATOMIC_ACQUIRE)) experts[count++] = expert;
    }
    if (count) moe->load(moe->context, count, experts);
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
        bucket->m = 0; /* needed again below */
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
    load_missing(pass, place);
}

/* --- weights in mapped files that exceed the memory --------------------------------------------------------------- */

typedef struct {
    const kt_pass *pass;
    atomic_llong next;
} requests;

static void request_matrix(int format, const void *codes, const void *scales, int64_t n, int64_t k) {
    int64_t code_bytes, scale_bytes;
    if (!codes || ktq_weight_bytes(format, n, k, &code_bytes, &scale_bytes) != KTQ_OK) return;
    kt_read_ahead(codes, code_bytes);
    if (scales) kt_read_ahead(scales, scale_bytes);
}

/* Requests experts until none is left. All threads do, since requests take much longer than for pages in memory. */
static void request_experts(void *argument, int group, int worker) {
    (void)group, (void)worker;
    requests *requests = argument;
    const kt_pass *pass = requests->pass;
    const ktq_moe *moe = pass->moe;
    for (int64_t b; (b = atomic_fetch_add(&requests->next, 1)) < pass->buckets;)
        for (int64_t slice = 0; slice < moe->slices; slice++) {
            const ktq_expert *expert = &moe->expert[slice * moe->experts + pass->bucket[b].expert];
            int64_t width = moe->width[slice];
            request_matrix(moe->gate_format, expert->gate, expert->gate_scale, width, moe->hidden);
            request_matrix(moe->up_format, expert->up, expert->up_scale, width, moe->hidden);
            request_matrix(moe->down_format, expert->down, expert->down_scale, moe->hidden, width);
        }
}

/* --- tasks -------------------------------------------------------------------------------------------------------- */

static void add(kt_group *group, kt_task task) {
    group->task[group->tasks++] = task;
}

/* Number of a bucket's panels in a task, such that each thread gets about TASKS_PER_THREAD tasks. */
static int64_t panels_per_task(const kt_pass *pass, int64_t m, int64_t panels, int64_t threads, int64_t most) {
    double all = 0;
    for (int64_t b = 0; b < pass->buckets; b++) all += (double)panels * (double)(pass->bucket[b].m + PANEL_COST);
    int64_t count = (int64_t)(all / (double)(threads * TASKS_PER_THREAD) / (double)(m + PANEL_COST));
    return count < 1 ? 1 : count > most ? most : count;
}

static void add_down(const kt_pass *pass, kt_group *group, int64_t section, int64_t threads) {
    int64_t columns = pass->moe->hidden - section * pass->section_columns;
    int64_t panels = (columns < pass->section_columns ? columns : pass->section_columns) / KT_PANEL_ROWS;
    for (int64_t slice = 0; slice < group->slices; slice++)
        for (int64_t b = 0; b < pass->buckets; b++) {
            int64_t step = panels_per_task(pass, pass->bucket[b].m, panels * group->slices, threads, KT_MAX_PANELS);
            for (int64_t s = 0; s < panels; s += step, group->down_pending[section]++)
                add(group, (kt_task){KT_DOWN, (int)slice, b, section, s, panels - s < step ? panels - s : step});
        }
}

static void add_combine(const kt_pass *pass, kt_group *group, int64_t section, int64_t threads) {
    int64_t step = kt_ceil_divide(pass->tokens, threads);
    if (step > KT_ROW_BLOCK) step = KT_ROW_BLOCK;
    for (int64_t t = 0; t < pass->tokens; t += step, group->combine_pending[section]++)
        add(group, (kt_task){KT_COMBINE, 0, 0, section, t, pass->tokens - t < step ? pass->tokens - t : step});
}

static void plan_group(const kt_pass *pass, kt_group *group, int64_t threads) {
    int64_t widest = pass->width / KT_PANEL_ROWS;
    group->threads = threads;
    group->tasks = 0;
    group->next = 0;
    group->quantize_pending = 0;
    int64_t tokens =
        kt_ceil_divide(pass->tokens, threads) < KT_ROW_BLOCK ? kt_ceil_divide(pass->tokens, threads) : KT_ROW_BLOCK;
    for (int64_t t = 0; t < pass->tokens; t += tokens, group->quantize_pending++)
        add(group, (kt_task){KT_QUANTIZE, 0, 0, 0, t, pass->tokens - t < tokens ? pass->tokens - t : tokens});
    for (int64_t slice = 0; slice < group->slices; slice++)
        for (int64_t b = 0; b < pass->buckets; b++) {
            int64_t panels = pass->moe->width[group->slice_number[slice]] / KT_PANEL_ROWS;
            int64_t step = panels_per_task(pass, pass->bucket[b].m, widest * group->slices, threads, KT_MAX_PANELS / 2);
            atomic_int *pending = &group->gate_up_pending[slice * pass->buckets + b];
            *pending = 0;
            for (int64_t s = 0; s < panels; s += step, ++*pending)
                add(group, (kt_task){KT_GATE_UP, (int)slice, b, 0, s, panels - s < step ? panels - s : step});
        }
    for (int64_t slice = 0; pass->arithmetic->requantize && slice < group->slices; slice++)
        for (int64_t b = 0; b < pass->buckets; b++) {
            atomic_int *pending = &group->requantize_pending[slice * pass->buckets + b];
            int64_t m = pass->bucket[b].m;
            *pending = m <= KT_REQUANTIZED_AT_ONCE;
            for (int64_t t = 0; m > KT_REQUANTIZED_AT_ONCE && t < m; t += KT_ROW_BLOCK, ++*pending)
                add(group, (kt_task){KT_REQUANTIZE, (int)slice, b, 0, t, m - t < KT_ROW_BLOCK ? m - t : KT_ROW_BLOCK});
        }
    for (int64_t p = 0; p < pass->sections; p++) group->down_pending[p] = group->combine_pending[p] = 0;
    for (int64_t p = 0; p <= pass->sections; p++) {
        if (p < pass->sections) add_down(pass, group, p, threads);
        if (p > 0) add_combine(pass, group, p - 1, threads);
    }
}

/* An upper bound for the number of tasks that plan_group adds. */
static int64_t max_tasks(const kt_pass *pass, const kt_group *group) {
    int64_t cells = group->slices * pass->buckets, panels = pass->width / KT_PANEL_ROWS,
            columns = pass->moe->hidden / KT_PANEL_ROWS;
    return pass->tokens * (1 + pass->sections) + cells * (panels + columns + 1) + group->slices * pass->rows;
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

/* Allocates the memory for sorting tokens, and returns the scratch of kt_sort_tokens. */
static int64_t *allocate_sorting(kt_pass *pass, kt_arena *arena) {
    int64_t *place;
    KT_ALLOCATE(place, pass->moe->experts);
    KT_ALLOCATE(pass->bucket, pass->moe->experts);
    KT_ALLOCATE(pass->pair, pass->tokens * pass->call->topk);
    KT_ALLOCATE(pass->group, pass->groups);
    return place;
}

static void allocate_group(const kt_pass *pass, kt_group *group, kt_arena *arena) {
    int64_t cells = group->slices * pass->buckets;
    KT_ALLOCATE(group->task, max_tasks(pass, group));
    KT_ALLOCATE(group->gate_up_pending, cells);
    if (pass->arithmetic->requantize) KT_ALLOCATE(group->requantize_pending, cells);
    KT_ALLOCATE(group->down_pending, pass->sections);
    KT_ALLOCATE(group->combine_pending, pass->sections);
    KT_ALLOCATE(group->y, (pass->sections > 1 ? 2 : 1) * group->slices * pass->rows * pass->section_columns);
    pass->arithmetic->allocate(pass, group, arena);
}

static void allocate_workers(kt_pass *pass, int workers, kt_arena *arena) {
    KT_ALLOCATE(pass->scratch, workers);
    for (int i = 0; i < workers; i++) {
        kt_worker_scratch none, *scratch = arena->base ? &pass->scratch[i] : &none;
        scratch->c = kt_allocate(arena, KT_MAX_PANELS * KT_MAX_SUMS * KT_PANEL_ROWS, sizeof(float));
        KT_ALLOCATE(scratch->gemm, KT_GEMM_SCRATCH);
        KT_ALLOCATE(scratch->sums, pass->moe->slices * pass->section_columns);
        KT_ALLOCATE(scratch->rows, pass->call->topk);
        KT_ALLOCATE(scratch->weights, pass->call->topk);
        KT_ALLOCATE(scratch->place, pass->call->topk);
    }
}

/* Number of NUMA slices of a group. Slices go to groups in turn. */
static int64_t count_group_slices(const kt_pass *pass, int g) {
    return kt_ceil_divide(pass->moe->slices - g, pass->groups);
}

static void allocate(kt_pass *pass, int workers, kt_arena *arena) {
    allocate_sorting(pass, arena);
    allocate_workers(pass, workers, arena);
    for (int g = 0; g < pass->groups; g++) {
        kt_group none = {0}, *group = arena->base ? &pass->group[g] : &none;
        *group = (kt_group){.slices = count_group_slices(pass, g)};
        KT_ALLOCATE(group->slice_number, group->slices);
        for (int64_t i = 0; arena->base && i < group->slices; i++) group->slice_number[i] = g + i * pass->groups;
        allocate_group(pass, group, arena);
    }
    if (pass->groups > 1) KT_ALLOCATE(pass->partial, pass->moe->slices * pass->tokens * pass->moe->hidden);
}

/* --- the forward -------------------------------------------------------------------------------------------------- */

static void choose_sections(kt_pass *pass) {
    int64_t hidden = pass->moe->hidden, slices = count_group_slices(pass, 0), rows = pass->rows ? pass->rows : 1;
    int64_t columns = SECTIONS_BUDGET / (2 * (int64_t)sizeof(float) * slices * rows) / KT_PANEL_ROWS * KT_PANEL_ROWS;
    if (columns < LEAST_SECTION) columns = LEAST_SECTION;
    pass->section_columns = columns < hidden ? columns : hidden;
    pass->sections = kt_ceil_divide(hidden, pass->section_columns);
}

static int run_pass(ktq_pool *pool, kt_pass *pass) {
    int workers = kt_pool_workers(pool);
    kt_arena needed = {0};
    allocate_sorting(pass, &needed);
    kt_arena first = {.base = kt_pool_memory(pool, needed.used, 0)};
    if (!first.base) return KTQ_ENOMEM;
    kt_sort_tokens(pass, allocate_sorting(pass, &first));
    kt_unpoison_gaps(&first);
    if (pass->moe->read_ahead) kt_pool_run(pool, request_experts, &(requests){.pass = pass});
    choose_sections(pass);

    needed = (kt_arena){0};
    kt_pass copy = *pass;
    allocate(&copy, workers, &needed);
    kt_arena whole = {.base = kt_pool_memory(pool, needed.used, first.used)}; /* begins with the sorted tokens */
    if (!whole.base) return KTQ_ENOMEM;
    allocate(pass, workers, &whole);

    for (int g = 0; g < pass->groups; g++) plan_group(pass, &pass->group[g], kt_ceil_divide(workers, pass->groups));
    pass->next_merge = 0;
    pass->merge_tasks = kt_ceil_divide(pass->tokens, KT_ROW_BLOCK);
    kt_pool_run(pool, kt_run_tasks, pass);
    kt_unpoison_gaps(&whole);
    return KTQ_OK;
}

/* Number of tokens of a pass, such that its rows take at most ROWS_BUDGET. */
static int64_t tokens_per_pass(const ktq_moe *moe, const ktq_call *call) {
    const kt_format *down = kt_get_format(moe->down_format);
    int64_t h_bytes = down->arithmetic->h_bytes * kt_terms(down);
    int64_t row = down->arithmetic->a_bytes * moe->hidden + h_bytes * kt_widest_slice(moe) * moe->slices;
    int64_t tokens = ROWS_BUDGET / row / call->topk;
    return tokens < 1 ? 1 : tokens;
}

int kt_run_passes(ktq_pool *pool, const ktq_moe *moe, const ktq_call *call) {
    int error = KTQ_OK;
    int groups = kt_pool_groups(pool) < moe->slices ? kt_pool_groups(pool) : (int)moe->slices;
    int64_t step = tokens_per_pass(moe, call);
    for (int64_t t = 0; !error && t < call->tokens; t += step) {
        int64_t tokens = call->tokens - t < step ? call->tokens - t : step;
        kt_pass pass = {.moe = moe,
                        .gate = kt_get_format(moe->gate_format),
                        .up = kt_get_format(moe->up_format),
                        .down = kt_get_format(moe->down_format),
                        .width = kt_widest_slice(moe),
                        .call = call,
                        .kernels = kt_current(),
                        .first_token = t,
                        .tokens = tokens,
                        .groups = groups};
        pass.arithmetic = pass.gate->arithmetic;
        error = run_pass(pool, &pass);
    }
    return error;
}
