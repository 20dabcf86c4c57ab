/* The five tasks of a forward and the order in which a thread takes them. What they compute: numerics.md, section 5. */
#include <sched.h>

#include "bf16.h"
#include "moe.h"

static void wait_for(const atomic_int *left) {
    for (int spin = 0; atomic_load_explicit(left, memory_order_acquire); spin++) {
        if (spin < 1000) kt_pause();
        else sched_yield(); /* more threads than CPUs */
    }
}

static void count_down(atomic_int *left) {
    atomic_fetch_sub_explicit(left, 1, memory_order_release);
}

static void run_quantize(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch) {
    for (int64_t t = task->first; t < task->first + task->count; t++)
        pass->arithmetic->quantize(pass, group, t, scratch);
    count_down(&group->to_quantize);
}

static int64_t cell_of(const kt_pass *pass, const kt_task *task) {
    return task->part * pass->buckets + task->bucket;
}

static void run_gate_up(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch) {
    wait_for(&group->to_quantize);
    const kt_arithmetic *arithmetic = pass->arithmetic;
    int64_t cell = cell_of(pass, task), m = pass->bucket[task->bucket].m;
    arithmetic->gate_up(pass, group, task, scratch);
    int left = atomic_fetch_sub_explicit(&group->gate_up_left[cell], 1, memory_order_acq_rel) - 1;
    if (left || !arithmetic->requantize || m > KT_REQUANTIZED_AT_ONCE) return;
    arithmetic->requantize(pass, group, &(kt_task){KT_REQUANTIZE, task->part, task->bucket, 0, 0, m});
    count_down(&group->requantize_left[cell]);
}

static void run_requantize(const kt_pass *pass, kt_group *group, const kt_task *task) {
    wait_for(&group->gate_up_left[cell_of(pass, task)]);
    pass->arithmetic->requantize(pass, group, task);
    count_down(&group->requantize_left[cell_of(pass, task)]);
}

static void run_down(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch) {
    wait_for(&(group->requantize_left ? group->requantize_left : group->gate_up_left)[cell_of(pass, task)]);
    if (task->section >= 2)
        wait_for(&group->combine_left[task->section - 2]); /* the readers of this half's previous section */
    pass->arithmetic->down(pass, group, task, scratch);
    count_down(&group->down_left[task->section]);
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

static void run_combine(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch) {
    int64_t topk = pass->call->topk, hidden = pass->moe->hidden, column = task->section * pass->section_columns;
    int64_t columns = hidden - column < pass->section_columns ? hidden - column : pass->section_columns;
    float *sums[KTQ_MOST_PARTS];
    wait_for(&group->down_left[task->section]);
    for (int64_t t = task->first; t < task->first + task->count; t++) {
        for (int64_t part = 0; part < group->parts; part++) {
            int64_t from = (task->section % 2 * group->parts + part) * pass->rows;
            const float *y = group->y + from * pass->section_columns;
            int64_t terms = 0;
            for (int64_t j = 0; j < topk; j++) {
                int64_t row = pass->pair[t * topk + j].row;
                if (row < 0) continue;
                scratch->rows[terms] = y + row * pass->section_columns;
                scratch->weights[terms++] = pass->call->weights[(pass->first_token + t) * topk + j];
            }
            float *out = pass->partial ? pass->partial + (group->part[part] * pass->tokens + t) * hidden + column
                                       : scratch->sums + part * pass->section_columns;
            pass->kernels->combine(terms, scratch->rows, scratch->weights, columns, out);
            sums[part] = out;
        }
        if (!pass->partial) merge_parts(pass, group->parts, sums, t, column, columns);
    }
    count_down(&group->combine_left[task->section]);
}

static void run_merge(const kt_pass *pass, int64_t task) {
    float *sums[KTQ_MOST_PARTS];
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
            case KT_QUANTIZE: run_quantize(pass, group, task, &pass->scratch[worker]); break;
            case KT_GATE_UP: run_gate_up(pass, group, task, &pass->scratch[worker]); break;
            case KT_REQUANTIZE: run_requantize(pass, group, task); break;
            case KT_DOWN: run_down(pass, group, task, &pass->scratch[worker]); break;
            case KT_COMBINE: run_combine(pass, group, task, &pass->scratch[worker]); break;
            }
        }
    }
    if (pass->partial) {
        int64_t next;
        while ((next = atomic_fetch_add_explicit(&pass->next_merge, 1, memory_order_relaxed)) < pass->merge_tasks) {
            for (int g = 0; g < pass->groups; g++) /* the last section is combined last */
                for (int64_t p = 0; p < pass->sections; p++) wait_for(&pass->group[g].combine_left[p]);
            run_merge(pass, next);
        }
    }
    kt_leave(state);
}
