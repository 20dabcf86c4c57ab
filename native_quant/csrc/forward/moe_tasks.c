/* The five tasks of a forward and the order in which a thread takes them. What they compute: NUMERICS.md, section 5. */
#include <sched.h>
#include <string.h>

#include "bf16.h"
#include "moe.h"

static void wait_for(const atomic_int *left) {
    for (int spin = 0; atomic_load_explicit(left, memory_order_acquire); spin++) {
        if (spin < 1000) kt_pause();
        else sched_yield(); /* more threads than CPUs */
    }
}

static void done(atomic_int *left) {
    atomic_fetch_sub_explicit(left, 1, memory_order_release);
}

static int64_t column_blocks(int64_t k) {
    return kt_blocks(k, KT_K_BLOCK);
}

/* Tokens first .. of the pass: quantized once, copied to the row of every expert that wants them. */
static void quantize(const kt_pass *pass, kt_group *group, const kt_task *task) {
    int64_t k = pass->moe->hidden, topk = pass->call->topk, sums = column_blocks(k);
    for (int64_t t = task->first; t < task->first + task->count; t++) {
        const uint16_t *x = pass->call->hidden + (pass->first_token + t) * k;
        int64_t made = -1;
        for (int64_t j = 0; j < topk; j++) {
            int64_t row = pass->row_of[t * topk + j];
            if (row < 0) continue;
            if (made < 0) {
                group->a_scale[row] =
                    pass->kernels->quantize_row(1, x, k, group->a + row * k, group->a_sums + row * sums);
                made = row;
                continue;
            }
            memcpy(group->a + row * k, group->a + made * k, (size_t)k);
            memcpy(group->a_sums + row * sums, group->a_sums + made * sums, (size_t)sums * sizeof *group->a_sums);
            group->a_scale[row] = group->a_scale[made];
        }
    }
    done(&group->to_quantize);
}

static const ktq_expert *expert_of(const kt_pass *pass, const kt_group *group, const kt_task *task) {
    return &pass->moe->expert[group->part[task->part] * pass->moe->experts + pass->bucket[task->bucket].expert];
}

static void multiply(const kt_pass *pass, const kt_gemm *job) {
    (pass->moe->bits == 8 ? pass->kernels->gemm_int8 : pass->kernels->gemm_int4)(job);
}

/* A gate strip, its up strip, the next gate strip ...: two streams from memory. */
static void gate_up(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch) {
    const ktq_moe *moe = pass->moe;
    const kt_bucket *bucket = &pass->bucket[task->bucket];
    const ktq_expert *expert = expert_of(pass, group, task);
    kt_strip strip[KT_MAX_STRIPS];
    for (int64_t i = 0; i < task->count; i++) {
        strip[2 * i] = kt_strip_of(moe->bits, expert->gate, moe->hidden, task->first + i);
        strip[2 * i + 1] = kt_strip_of(moe->bits, expert->up, moe->hidden, task->first + i);
    }
    wait_for(&group->to_quantize);
    for (int64_t t = 0; t < bucket->m; t += KT_TOKEN_BLOCK) {
        int64_t row = bucket->first + t, m = bucket->m - t < KT_TOKEN_BLOCK ? bucket->m - t : KT_TOKEN_BLOCK;
        int64_t c_pitch = kt_blocks(m, 32) * 32 * KT_STRIP_ROWS;
        multiply(pass, &(kt_gemm){.m = m, .k = moe->hidden, .a = group->a + row * moe->hidden, .a_pitch = moe->hidden,
                                  .sums = group->a_sums + row * column_blocks(moe->hidden),
                                  .sums_pitch = column_blocks(moe->hidden), .strips = 2 * task->count, .strip = strip,
                                  .c = scratch->c, .c_pitch = c_pitch, .scratch = scratch->gemm});
        for (int64_t i = 0; i < task->count; i++) {
            int64_t column = (task->first + i) * KT_STRIP_ROWS;
            pass->kernels->swiglu(
                &(kt_outputs){.exact = pass->call->exact,
                              .m = m,
                              .unit = kt_geometry_of(moe->bits)->unit,
                              .token_scale = group->a_scale + row,
                              .acc = {scratch->c + 2 * i * c_pitch, scratch->c + (2 * i + 1) * c_pitch},
                              .row_scale = {expert->gate_scale + column, expert->up_scale + column},
                              .out = group->h + (task->part * pass->rows + row) * moe->width + column,
                              .out_pitch = moe->width});
        }
    }
    done(&group->gate_up_left[task->part * pass->buckets + task->bucket]);
}

/* Rows of h as int8; in the default mode coarse ones get a second row for the remainder. */
static void requantize(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch) {
    int64_t k = pass->moe->width, sums = column_blocks(k), cell = task->part * pass->buckets + task->bucket;
    const kt_bucket *bucket = &pass->bucket[task->bucket];
    const float *h = group->h + (task->part * pass->rows + bucket->first) * k;
    int64_t first = kt_h_row(pass, task->part, task->bucket);
    wait_for(&group->gate_up_left[cell]);
    for (int64_t t = task->first; t < task->first + task->count; t++) {
        int64_t row = first + t;
        int8_t *q = group->hq + row * k;
        group->h_scale[row] = pass->kernels->quantize_row(0, h + t * k, k, q, group->h_sums + row * sums);
        if (pass->call->exact) continue;
        int8_t *left = (int8_t *)scratch->gemm;
        int32_t left_sums[KT_MAX_COLUMNS / KT_K_BLOCK + 1];
        float step = pass->kernels->remainder(h + t * k, k, group->h_scale[row], q, left, left_sums);
        if (step == 0) continue;
        int64_t next = first + bucket->m + atomic_fetch_add_explicit(&group->remainders[cell], 1, memory_order_relaxed);
        memcpy(group->hq + next * k, left, (size_t)k);
        memcpy(group->h_sums + next * sums, left_sums, (size_t)sums * sizeof *left_sums);
        group->h_scale[next] = step;
        group->remainder_of[next] = t;
    }
    done(&group->requantize_left[cell]);
}

/* Adds the products of the rows' remainders to 32 columns of y, whose rows are `pitch` apart. */
static void add_remainders(const kt_pass *pass, kt_outputs job, const int64_t *remainder_of, float *y, int64_t pitch) {
    float sum[KT_STRIP_ROWS];
    job.out = sum;
    for (int64_t rows = job.m, i = 0; i < rows; i++) {
        job.m = 1;
        pass->kernels->scale_rows(&job);
        float *out = y + remainder_of[i] * pitch;
        for (int64_t r = 0; r < KT_STRIP_ROWS; r++) out[r] += sum[r];
        job.token_scale++;
        job.acc[0] += KT_STRIP_ROWS;
    }
}

static void down(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch) {
    const ktq_moe *moe = pass->moe;
    const kt_bucket *bucket = &pass->bucket[task->bucket];
    const ktq_expert *expert = expert_of(pass, group, task);
    int64_t cell = task->part * pass->buckets + task->bucket, h_row = kt_h_row(pass, task->part, task->bucket);
    int64_t first = task->panel * (pass->panel_columns / KT_STRIP_ROWS) + task->first, half = kt_blocks(task->count, 2);
    /* One from the first half, one from the second: two streams from memory. */
    kt_strip strip[KT_MAX_STRIPS];
    int64_t place[KT_MAX_STRIPS];
    for (int64_t i = 0; i < task->count; i++) {
        place[i] = i % 2 ? half + i / 2 : i / 2;
        strip[i] = kt_strip_of(moe->bits, expert->down, moe->width, first + place[i]);
    }
    wait_for(&group->requantize_left[cell]);
    if (task->panel >= 2)
        wait_for(&group->combine_left[task->panel - 2]); /* the readers of this half's previous panel */
    int64_t rows = bucket->m + atomic_load_explicit(&group->remainders[cell], memory_order_relaxed);
    float *y =
        group->y + ((task->panel % 2 * group->parts + task->part) * pass->rows + bucket->first) * pass->panel_columns;
    for (int64_t t = 0; t < rows; t += KT_TOKEN_BLOCK) {
        int64_t m = rows - t < KT_TOKEN_BLOCK ? rows - t : KT_TOKEN_BLOCK,
                c_pitch = kt_blocks(m, 32) * 32 * KT_STRIP_ROWS;
        int64_t whole = bucket->m < t ? 0 : bucket->m - t < m ? bucket->m - t : m; /* then come remainders */
        multiply(pass, &(kt_gemm){.m = m,
                                  .k = moe->width,
                                  .a = group->hq + (h_row + t) * moe->width,
                                  .a_pitch = moe->width,
                                  .sums = group->h_sums + (h_row + t) * column_blocks(moe->width),
                                  .sums_pitch = column_blocks(moe->width),
                                  .strips = task->count,
                                  .strip = strip,
                                  .c = scratch->c,
                                  .c_pitch = c_pitch,
                                  .scratch = scratch->gemm});
        for (int64_t i = 0; i < task->count; i++) {
            float *columns = y + (task->first + place[i]) * KT_STRIP_ROWS;
            kt_outputs job = {.exact = pass->call->exact,
                              .m = whole,
                              .unit = kt_geometry_of(moe->bits)->unit,
                              .token_scale = group->h_scale + h_row + t,
                              .acc = {scratch->c + i * c_pitch},
                              .row_scale = {expert->down_scale + (first + place[i]) * KT_STRIP_ROWS},
                              .out = columns + t * pass->panel_columns,
                              .out_pitch = pass->panel_columns};
            if (whole) pass->kernels->scale_rows(&job);
            job.m = m - whole;
            job.token_scale += whole;
            job.acc[0] += whole * KT_STRIP_ROWS;
            if (job.m) add_remainders(pass, job, group->remainder_of + h_row + t + whole, columns, pass->panel_columns);
        }
    }
    done(&group->down_left[task->panel]);
}

/* The parts of columns `column` .. of token t become the output; with `add` its previous value goes into the first
   part's sum, as in kt-kernel. */
static void merge_parts(const kt_pass *pass, int64_t parts, float *const *sums, int64_t t, int64_t column,
                        int64_t columns) {
    uint16_t *out = pass->call->out + (pass->first_token + t) * pass->moe->hidden + column;
    if (pass->call->add)
        for (int64_t c = 0; c < columns; c++) sums[0][c] += kt_from_bf16(out[c]);
    pass->kernels->merge(parts, (const float *const *)sums, columns, out);
}

static void combine(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch) {
    int64_t topk = pass->call->topk, hidden = pass->moe->hidden, column = task->panel * pass->panel_columns;
    int64_t columns = hidden - column < pass->panel_columns ? hidden - column : pass->panel_columns;
    float *sums[64];
    wait_for(&group->down_left[task->panel]);
    for (int64_t t = task->first; t < task->first + task->count; t++) {
        for (int64_t part = 0; part < group->parts; part++) {
            const float *y = group->y + ((task->panel % 2 * group->parts + part) * pass->rows) * pass->panel_columns;
            int64_t terms = 0;
            for (int64_t j = 0; j < topk; j++) {
                int64_t row = pass->row_of[t * topk + j];
                if (row < 0) continue;
                scratch->rows[terms] = y + row * pass->panel_columns;
                scratch->weights[terms++] = pass->call->weights[(pass->first_token + t) * topk + j];
            }
            float *out = pass->partial ? pass->partial + (group->part[part] * pass->tokens + t) * hidden + column
                                       : scratch->sums + part * pass->panel_columns;
            pass->kernels->combine(terms, scratch->rows, scratch->weights, columns, out);
            sums[part] = out;
        }
        if (!pass->partial) merge_parts(pass, group->parts, sums, t, column, columns);
    }
    done(&group->combine_left[task->panel]);
}

static void merge(const kt_pass *pass, int64_t task) {
    float *sums[64];
    int64_t hidden = pass->moe->hidden;
    for (int64_t t = task * KT_ROW_BLOCK; t < (task + 1) * KT_ROW_BLOCK && t < pass->tokens; t++) {
        for (int64_t part = 0; part < pass->moe->parts; part++)
            sums[part] = pass->partial + (part * pass->tokens + t) * hidden;
        merge_parts(pass, pass->moe->parts, sums, t, 0, hidden);
    }
}

void kt_moe_work(void *argument, int group_number, int worker) {
    kt_pass *pass = argument;
    kt_fp_state state = kt_enter_forward();
    for (int g = 0; g < pass->groups; g++) {
        kt_group *group = &pass->group[(group_number + g) % pass->groups];
        int64_t next;
        while ((next = atomic_fetch_add_explicit(&group->next, 1, memory_order_relaxed)) < group->tasks) {
            const kt_task *task = &group->task[next];
            switch (task->kind) {
            case KT_QUANTIZE: quantize(pass, group, task); break;
            case KT_GATE_UP: gate_up(pass, group, task, &pass->scratch[worker]); break;
            case KT_REQUANTIZE: requantize(pass, group, task, &pass->scratch[worker]); break;
            case KT_DOWN: down(pass, group, task, &pass->scratch[worker]); break;
            case KT_COMBINE: combine(pass, group, task, &pass->scratch[worker]); break;
            }
        }
    }
    if (pass->partial) {
        int64_t next;
        while ((next = atomic_fetch_add_explicit(&pass->next_merge, 1, memory_order_relaxed)) < pass->merge_tasks) {
            for (int g = 0; g < pass->groups; g++) /* the last panel is combined last */
                for (int64_t p = 0; p < pass->panels; p++) wait_for(&pass->group[g].combine_left[p]);
            merge(pass, next);
        }
    }
    kt_leave(state);
}
