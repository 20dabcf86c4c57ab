/* The ranges of a training step, which a pool's workers claim one by one. */
#include "train.h"

enum {
    TOKENS = 16,        /* tokens of a range */
    FACTOR_PANELS = 16, /* panels of a factor's gradient in a range */
};

static void add(kt_training *t, int group, kt_range range) {
    t->ranges[t->end[group]++] = range;
}

static void begin_group(kt_training *t, int group) {
    t->end[group] = group ? t->end[group - 1] : 0;
    t->group[group].next = t->end[group];
}

static void add_range(kt_training *t, int group, int64_t bucket, int64_t slice, int64_t count, int64_t step) {
    for (int64_t i = 0; i < count; i += step)
        add(t, group, (kt_range){bucket, slice, i, count - i < step ? count - i : step});
}

static void work(void *argument, int group, int worker) {
    kt_training *t = argument;
    kt_fp_state state = kt_enter_forward();
    for (int g = 0, next; g < t->pass.groups; g++) {
        int at = (group + g) % t->pass.groups;
        while ((next = (int)atomic_fetch_add_explicit(&t->group[at].next, 1, memory_order_relaxed)) < t->end[at])
            t->step(t, &t->ranges[next], &t->scratch[worker]);
    }
    kt_leave(state);
}

static void run(ktq_pool *pool, kt_training *t, kt_step *step) {
    t->step = step;
    kt_pool_run(pool, work, t);
}

void kt_run_blocks(ktq_pool *pool, kt_training *t, kt_step *step) {
    for (int g = 0; g < t->pass.groups; g++) {
        begin_group(t, g);
        for (int64_t b = 0; !g && b < t->pass.buckets; b++) add_range(t, g, b, 0, t->pass.bucket[b].m, KT_TOKEN_BLOCK);
    }
    run(pool, t, step);
}

void kt_run_panels(ktq_pool *pool, kt_training *t, int64_t slices, int64_t panels, kt_step *step) {
    for (int g = 0; g < t->pass.groups; g++) {
        begin_group(t, g);
        for (int64_t slice = g; slice < slices; slice += t->pass.groups)
            for (int64_t b = 0; b < t->pass.buckets; b++)
                add_range(t, g, b, slice, panels ? panels : t->moe->width[slice] / KT_PANEL_ROWS, KT_STEP_PANELS);
    }
    run(pool, t, step);
}

void kt_run_tokens(ktq_pool *pool, kt_training *t, kt_step *step) {
    for (int g = 0; g < t->pass.groups; g++) {
        begin_group(t, g);
        if (!g) add_range(t, g, 0, 0, t->call->tokens, TOKENS);
    }
    run(pool, t, step);
}

void kt_run_factors(ktq_pool *pool, kt_training *t) {
    for (int g = 0; g < t->pass.groups; g++) {
        begin_group(t, g);
        for (int64_t b = 0; !g && b < t->pass.buckets; b++)
            for (int64_t i = 2 * kt_first_projection(t); i < 2 * KT_PROJECTIONS; i++) {
                int is_hidden = (i / 2 == KT_PROJECTION_DOWN) == i % 2;
                add_range(t, g, b, i, (is_hidden ? t->moe->hidden : t->columns) / KT_PANEL_ROWS, FACTOR_PANELS);
            }
    }
    run(pool, t, kt_factor_gradient);
}

int64_t kt_max_ranges(const kt_training *t) {
    int64_t panels = t->columns / KT_PANEL_ROWS + (t->moe->slices + 1) * (t->moe->hidden / KT_PANEL_ROWS + 1);
    return t->call->tokens + t->pass.rows + t->pass.buckets * 2 * KT_PROJECTIONS * (panels + t->moe->slices);
}
