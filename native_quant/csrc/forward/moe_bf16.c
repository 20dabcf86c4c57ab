/* BF16 arithmetic: activations as they are, float32 sums (numerics.md, section 5b). */
#include <string.h>

#include "bf16.h"
#include "moe.h"

static void allocate(const kt_pass *pass, kt_group *group, kt_arena *arena) {
    KT_TAKE(group->bf16.a, pass->rows * pass->moe->hidden);
    KT_TAKE(group->bf16.h, group->parts * kt_terms(pass->down) * pass->rows * pass->width);
    if (pass->gate->least || pass->up->least)
        KT_TAKE(group->bf16.a_sums, pass->rows * pass->moe->hidden / KT_SUM_COLUMNS);
    if (pass->down->least)
        KT_TAKE(group->bf16.h_sums, group->parts * pass->rows * pass->width / KT_SUM_COLUMNS);
}

/* Adds up KT_SUM_COLUMNS activations in halves: 16 sums of two, 8 of four ... */
static float sum_activations(const uint16_t *x) {
    float sum[KT_SUM_COLUMNS];
    for (int i = 0; i < KT_SUM_COLUMNS; i++) sum[i] = kt_from_bf16(x[i]);
    for (int step = KT_SUM_COLUMNS / 2; step; step /= 2)
        for (int i = 0; i < step; i++) sum[i] += sum[i + step];
    return sum[0];
}

static void copy(const kt_pass *pass, kt_group *group, int64_t token, const kt_worker_scratch *scratch) {
    (void)scratch;
    int64_t k = pass->moe->hidden, topk = pass->call->topk;
    const uint16_t *x = pass->call->hidden + (pass->first_token + token) * k;
    float *sums = group->bf16.a_sums, *of_token = NULL;
    for (int64_t j = 0; j < topk; j++) {
        int64_t row = pass->pair[token * topk + j].row, groups = k / KT_SUM_COLUMNS;
        if (row < 0) continue;
        memcpy(group->bf16.a + row * k, x, (size_t)k * sizeof *x);
        if (!sums) continue;
        float *of_row = sums + row * groups;
        if (of_token) memcpy(of_row, of_token, (size_t)groups * sizeof *sums);
        for (int64_t g = 0; !of_token && g < groups; g++) of_row[g] = sum_activations(x + g * KT_SUM_COLUMNS);
        of_token = of_row;
    }
}

/* Rows a[m][k] times the panels, to scratch->c: the next panel's sums are m * 32 further. sums: those of the rows'
   activations. Panels of which some are multiplied as int16 and others as BF16 go one by one. */
static void multiply(const kt_pass *pass, int64_t m, int64_t k, const uint16_t *a, const float *sums, int64_t panels,
                     const kt_bf16_panel *panel, const kt_worker_scratch *scratch) {
    const int64_t step = panels > 1 && !panel[0].integers != !panel[1].integers ? 1 : panels;
    for (int64_t s = 0; s < panels; s += step) {
        kt_bf16_gemm_fn *gemm = panel[s].integers ? pass->kernels->gemm_int16 : pass->kernels->gemm_bf16;
        gemm(&(kt_bf16_gemm){.m = m,
                             .k = k,
                             .a = a,
                             .a_pitch = k,
                             .panels = step,
                             .panel = panel + s,
                             .sums = sums,
                             .kernels = pass->kernels,
                             .c = (float *)scratch->c + s * m * KT_PANEL_ROWS,
                             .c_pitch = m * KT_PANEL_ROWS,
                             .scratch = scratch->gemm});
    }
}

/* gate and up as the activation takes them (ktq_moe). alpha: silu(alpha * gate) is alpha times what is wanted. */
static void apply_limits(const ktq_moe *moe, int64_t count, float *gate, float *up) {
    float most = moe->swiglu_limit, alpha = moe->swiglu_alpha;
    for (int64_t i = 0; most > 0 && i < count; i++) {
        gate[i] = gate[i] > most ? most : alpha > 0 && gate[i] < -most ? -most : gate[i];
        up[i] = up[i] > most ? most : up[i] < -most ? -most : up[i];
    }
    for (int64_t i = 0; alpha > 0 && i < count; i++) {
        gate[i] *= alpha;
        up[i] = (up[i] + 1) / alpha;
    }
}

/* The place in h of the block of tokens that begins with a row, in a task's part of that width. */
static int64_t h_row(const kt_pass *pass, const kt_task *task, int64_t row, int64_t width) {
    return kt_terms(pass->down) * (task->part * pass->rows * pass->width + row * width);
}

/* A gate panel, its up panel, the next gate panel ...: two streams from memory. */
static void gate_up(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch) {
    int64_t k = pass->moe->hidden, width = kt_width_of(pass, group, task);
    const kt_bucket *bucket = &pass->bucket[task->bucket];
    const ktq_expert *expert = kt_expert_of(pass, group, task);
    float *c = scratch->c;
    kt_bf16_panel panel[KT_MAX_PANELS];
    for (int64_t i = 0; i < task->count; i++) {
        panel[2 * i] = kt_bf16_panel_of(pass->gate, expert->gate, expert->gate_scale, k, task->first + i);
        panel[2 * i + 1] = kt_bf16_panel_of(pass->up, expert->up, expert->up_scale, k, task->first + i);
    }
    for (int64_t t = 0; t < bucket->m; t += KT_TOKEN_BLOCK) {
        int64_t row = bucket->first + t, m = bucket->m - t < KT_TOKEN_BLOCK ? bucket->m - t : KT_TOKEN_BLOCK;
        const float *sums = group->bf16.a_sums ? group->bf16.a_sums + row * k / KT_SUM_COLUMNS : NULL;
        multiply(pass, m, k, group->bf16.a + row * k, sums, 2 * task->count, panel, scratch);
        for (int64_t i = 0; i < task->count; i++) {
            float *gate = c + 2 * i * m * KT_PANEL_ROWS, *up = gate + m * KT_PANEL_ROWS;
            int64_t first = h_row(pass, task, row, width) + (task->first + i) * KT_PANEL_ROWS;
            uint16_t *h = group->bf16.h + first;
            apply_limits(pass->moe, m * KT_PANEL_ROWS, gate, up);
            pass->kernels->swiglu_bf16(m, gate, up, h, kt_terms(pass->down) > 1 ? h + m * width : NULL, width);
            for (int64_t j = 0; group->bf16.h_sums && j < m * width; j += width)
                group->bf16.h_sums[(first + j) / KT_SUM_COLUMNS] = sum_activations(h + j);
        }
    }
}

static void down(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch) {
    int64_t k = kt_width_of(pass, group, task), columns = pass->section_columns, terms = kt_terms(pass->down);
    const kt_bucket *bucket = &pass->bucket[task->bucket];
    const ktq_expert *expert = kt_expert_of(pass, group, task);
    float *y = kt_down_rows(pass, group, task);
    kt_bf16_panel panel[KT_MAX_PANELS];
    for (int64_t i = 0; i < task->count; i++) {
        int64_t index = task->section * (columns / KT_PANEL_ROWS) + task->first + kt_down_panel(task, i);
        panel[i] = kt_bf16_panel_of(pass->down, expert->down, expert->down_scale, k, index);
    }
    for (int64_t t = 0; t < bucket->m; t += KT_TOKEN_BLOCK) {
        int64_t m = bucket->m - t < KT_TOKEN_BLOCK ? bucket->m - t : KT_TOKEN_BLOCK;
        int64_t first = h_row(pass, task, bucket->first + t, k);
        const float *sums = group->bf16.h_sums ? group->bf16.h_sums + first / KT_SUM_COLUMNS : NULL;
        multiply(pass, terms * m, k, group->bf16.h + first, sums, task->count, panel, scratch);
        float *c = scratch->c;
        for (int64_t i = 0; i < task->count; i++, c += (terms - 1) * m * KT_PANEL_ROWS) {
            for (int64_t j = 0; terms > 1 && j < m * KT_PANEL_ROWS; j++) c[j] += c[m * KT_PANEL_ROWS + j];
            for (int64_t row = t; row < t + m; row++, c += KT_PANEL_ROWS)
                memcpy(y + row * columns + (task->first + kt_down_panel(task, i)) * KT_PANEL_ROWS, c,
                       KT_PANEL_ROWS * sizeof *c);
        }
    }
}

const kt_arithmetic kt_bf16_arithmetic = {
    .a_bytes = 2, .h_bytes = 2, .allocate = allocate, .quantize = copy, .gate_up = gate_up, .down = down};
