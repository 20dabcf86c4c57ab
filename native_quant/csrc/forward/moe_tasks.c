/* The five tasks of a forward, and the order in which a thread takes them. numerics.md, section 5, has the formulas. */
#include <sched.h>

#include "bf16.h"
#include "moe.h"

static void wait_for(const atomic_int *pending) {
    for (int spin = 0; atomic_load_explicit(pending, memory_order_acquire); spin++) {
        if (spin < 1000) kt_pause();
        else sched_yield(); /* more threads than CPUs */
    }
}

static void count_down(atomic_int *pending) {
    atomic_fetch_sub_explicit(pending, 1, memory_order_release);
}

static void run_quantize(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch) {
    for (int64_t t = task->first; t < task->first + task->count; t++)
        pass->arithmetic->quantize(pass, group, t, scratch);
    count_down(&group->quantize_pending);
}

static int64_t cell_number(const kt_pass *pass, const kt_task *task) {
    return task->slice * pass->buckets + task->bucket;
}

static void run_gate_up(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch) {
    wait_for(&group->quantize_pending);
    const kt_arithmetic *arithmetic = pass->arithmetic;
    int64_t cell = cell_number(pass, task), m = pass->bucket[task->bucket].m;
    arithmetic->gate_up(pass, group, task, scratch);
    int pending = atomic_fetch_sub_explicit(&group->gate_up_pending[cell], 1, memory_order_acq_rel) - 1;
    if (pending || !arithmetic->requantize || m > KT_REQUANTIZED_AT_ONCE) return;
    arithmetic->requantize(pass, group, &(kt_task){KT_REQUANTIZE, task->slice, task->bucket, 0, 0, m});
    count_down(&group->requantize_pending[cell]);
}

static void run_requantize(const kt_pass *pass, kt_group *group, const kt_task *task) {
    wait_for(&group->gate_up_pending[cell_number(pass, task)]);
    pass->arithmetic->requantize(pass, group, task);
    count_down(&group->requantize_pending[cell_number(pass, task)]);
}

static void run_down(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch) {
    wait_for(
        &(group->requantize_pending ? group->requantize_pending : group->gate_up_pending)[cell_number(pass, task)]);
    if (task->section >= 2)
        wait_for(&group->combine_pending[task->section - 2]); /* readers of the section before in this half of y */
    pass->arithmetic->down(pass, group, task, scratch);
    count_down(&group->down_pending[task->section]);
}

/* Adds the slices' sums of columns `column` .. of token t to the output. With `add`, the previous output is added to
   the first slice's sum, as in kt-kernel. */
static void merge_slices(const kt_pass *pass, int64_t slices, float *const *sums, int64_t t, int64_t column,
                         int64_t columns) {
    uint16_t *out = pass->call->out + (pass->first_token + t) * pass->moe->hidden + column;
    if (pass->call->add)
        for (int64_t c = 0; c < columns; c++) sums[0][c] += kt_from_bf16(out[c]);
    pass->kernels->merge(slices, (const float *const *)sums, columns, out);
}

static void run_combine(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch) {
    int64_t topk = pass->call->topk, hidden = pass->moe->hidden, column = task->section * pass->section_columns;
    int64_t columns = hidden - column < pass->section_columns ? hidden - column : pass->section_columns;
    float *sums[KTQ_MAX_SLICES];
    wait_for(&group->down_pending[task->section]);
    for (int64_t t = task->first; t < task->first + task->count; t++) {
        for (int64_t slice = 0; slice < group->slices; slice++) {
            int64_t from = (task->section % 2 * group->slices + slice) * pass->rows;
            const float *y = group->y + from * pass->section_columns;
            int64_t terms = 0;
            for (int64_t j = 0; j < topk; j++) {
                int64_t row = pass->pair[t * topk + j].row;
                if (row < 0) continue;
                scratch->rows[terms] = y + row * pass->section_columns;
                scratch->weights[terms++] =
                    kt_output_weight(pass->moe, pass->call->weights[(pass->first_token + t) * topk + j]);
            }
            float *out = pass->partial
                             ? pass->partial + (group->slice_number[slice] * pass->tokens + t) * hidden + column
                             : scratch->sums + slice * pass->section_columns;
            pass->kernels->combine(terms, scratch->rows, scratch->weights, columns, out);
            sums[slice] = out;
        }
        if (!pass->partial) merge_slices(pass, group->slices, sums, t, column, columns);
    }
    count_down(&group->combine_pending[task->section]);
}

static void run_merge(const kt_pass *pass, int64_t task) {
    float *sums[KTQ_MAX_SLICES];
    int64_t hidden = pass->moe->hidden;
    for (int64_t t = task * KT_ROW_BLOCK; t < (task + 1) * KT_ROW_BLOCK && t < pass->tokens; t++) {
        for (int64_t slice = 0; slice < pass->moe->slices; slice++)
            sums[slice] = pass->partial + (slice * pass->tokens + t) * hidden;
        merge_slices(pass, pass->moe->slices, sums, t, 0, hidden);
    }
}

void kt_run_tasks(void *argument, int group_number, int worker) {
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
                for (int64_t p = 0; p < pass->sections; p++) wait_for(&pass->group[g].combine_pending[p]);
            run_merge(pass, next);
        }
    }
    kt_leave(state);
}
