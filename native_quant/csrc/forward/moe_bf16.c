/* BF16 arithmetic: BF16 activations, float32 sums (numerics.md, section 5b). */
#include <string.h>

#include "bf16.h"
#include "moe.h"

static void allocate(const kt_pass *pass, kt_group *group, kt_arena *arena) {
    KT_ALLOCATE(group->bf16.a, pass->rows * pass->moe->hidden);
    KT_ALLOCATE(group->bf16.h, group->slices * kt_terms(pass->down) * pass->rows * pass->width);
    if (pass->gate->least || pass->up->least)
        KT_ALLOCATE(group->bf16.a_sums, pass->rows * pass->moe->hidden / KT_SUM_COLUMNS);
    if (pass->down->least) KT_ALLOCATE(group->bf16.h_sums, group->slices * pass->rows * pass->width / KT_SUM_COLUMNS);
}

/* How products of gate and up, or of down, round activations. */
typedef struct {
    int to_int8; /* 1: to 8 bits, if the weights are integers */
    int once;    /* 1: once for all panels, to 14 bits */
} rounding;

static rounding choose_rounding(const kt_pass *pass, int is_down) {
    const ktq_moe *moe = pass->moe;
    const kt_format *first = is_down ? pass->down : pass->gate, *second = is_down ? pass->down : pass->up;
    const uint32_t formats = is_down ? 1u << moe->down_format : 1u << moe->gate_format | 1u << moe->up_format;
    const int to_int8 = (pass->call->int8_formats & formats) == formats;
    return (rounding){to_int8, !to_int8 && kt_rounds_activations(first) && kt_rounds_activations(second)};
}

/* Adds up KT_SUM_COLUMNS activations each, pairwise: 16 sums of two, then 8 of four, and so on. If products round
   activations to 8 bits, adds up what they multiply. */
static void sum_activations(const kt_kernels *kernels, rounding rounds, int64_t columns, const uint16_t *x,
                            float *sums) {
    if (rounds.to_int8) {
        kernels->sum_units(columns, x, sums);
        return;
    }
    for (int64_t j = 0; j < columns; j += KT_SUM_COLUMNS, x += KT_SUM_COLUMNS) {
        float sum[KT_SUM_COLUMNS];
        for (int i = 0; i < KT_SUM_COLUMNS; i++) sum[i] = kt_from_bf16(x[i]);
        for (int step = KT_SUM_COLUMNS / 2; step; step /= 2)
            for (int i = 0; i < step; i++) sum[i] += sum[i + step];
        sums[j / KT_SUM_COLUMNS] = sum[0];
    }
}

static void copy_token(const kt_pass *pass, kt_group *group, int64_t token, const kt_worker_scratch *scratch) {
    (void)scratch;
    const int64_t k = pass->moe->hidden, topk = pass->call->topk, groups = k / KT_SUM_COLUMNS;
    const uint16_t *x = pass->call->hidden + (pass->first_token + token) * k, *before = NULL;
    const float *sums_before = NULL;
    const rounding rounds = choose_rounding(pass, 0);
    for (int64_t j = 0; j < topk; j++) {
        const int64_t row = pass->pair[token * topk + j].row;
        if (row < 0) continue;
        uint16_t *a = group->bf16.a + row * k;
        float *sums = group->bf16.a_sums ? group->bf16.a_sums + row * groups : NULL;
        if (before) {
            memcpy(a, before, (size_t)k * sizeof *a);
            if (sums) memcpy(sums, sums_before, (size_t)groups * sizeof *sums);
            continue;
        }
        memcpy(a, x, (size_t)k * sizeof *x);
        if (pass->moe->function.weights_on_input) {
            float weight = pass->call->weights[(pass->first_token + token) * topk + j];
            for (int64_t c = 0; c < k; c++) a[c] = kt_to_bf16(kt_from_bf16(x[c]) * weight);
        } else { /* all rows of the token are the same */
            before = a;
            sums_before = sums;
        }
        if (sums) sum_activations(pass->kernels, rounds, k, a, sums);
        if (rounds.once) pass->kernels->round_units(k, a);
    }
}

/* Multiplies rows a[m][k] with panels, to scratch->c [panel][m][32]. sums: sums of the rows' activations. If some
   panels are multiplied as int16 and others as BF16, each panel gets its own call. */
static void multiply(const kt_pass *pass, rounding rounds, int64_t m, int64_t k, const uint16_t *a, const float *sums,
                     int64_t panels, const kt_bf16_panel *panel, const kt_worker_scratch *scratch) {
    const int differ = panels > 1 && (panel[0].bits != panel[1].bits || panel[0].integers != panel[1].integers);
    const int64_t step = differ ? 1 : panels;
    for (int64_t s = 0; s < panels; s += step) {
        kt_bf16_gemm_fn *gemm = panel[s].integers ? pass->kernels->gemm_int16 : pass->kernels->gemm_bf16;
        gemm(&(kt_bf16_gemm){.int8 = rounds.to_int8,
                             .is_rounded = rounds.once,
                             .m = m,
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

/* Offset in h of the block of tokens that begins with a row, in a task's slice of this width. */
static int64_t h_row(const kt_pass *pass, const kt_task *task, int64_t row, int64_t width) {
    return kt_terms(pass->down) * (task->slice * pass->rows * pass->width + row * width);
}

/* Alternates gate panels and up panels, for two streams from memory. */
static void gate_up(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch) {
    int64_t k = pass->moe->hidden, width = kt_get_width(pass, group, task);
    const kt_bucket *bucket = &pass->bucket[task->bucket];
    const ktq_expert *expert = kt_get_expert(pass, group, task);
    const ktq_function *function = &pass->moe->function;
    kt_activation_fn *activation = kt_activation_of(pass->kernels, function->activation);
    int64_t sides = kt_sides(pass->moe);
    const rounding rounds_h = choose_rounding(pass, 1);
    float *c = scratch->c;
    kt_bf16_panel panel[KT_MAX_PANELS];
    for (int64_t i = 0; i < task->count; i++) {
        if (sides > 1)
            panel[2 * i] = kt_get_bf16_panel(pass->gate, expert->gate, expert->gate_scale, k, task->first + i);
        panel[sides * i + sides - 1] = kt_get_bf16_panel(pass->up, expert->up, expert->up_scale, k, task->first + i);
    }
    for (int64_t t = 0; t < bucket->m; t += KT_TOKEN_BLOCK) {
        int64_t row = bucket->first + t, m = bucket->m - t < KT_TOKEN_BLOCK ? bucket->m - t : KT_TOKEN_BLOCK;
        const float *sums = group->bf16.a_sums ? group->bf16.a_sums + row * k / KT_SUM_COLUMNS : NULL;
        multiply(pass, choose_rounding(pass, 0), m, k, group->bf16.a + row * k, sums,
                 sides * task->count, panel, scratch);
        for (int64_t i = 0; i < task->count; i++) {
            float *value = c + sides * i * m * KT_PANEL_ROWS, *up = sides > 1 ? value + m * KT_PANEL_ROWS : NULL;
            int64_t column = (task->first + i) * KT_PANEL_ROWS, first = h_row(pass, task, row, width) + column;
            uint16_t *h = group->bf16.h + first;
            kt_add_bias(kt_bias_at(up ? expert->gate_bias : expert->up_bias, column), m, value, KT_PANEL_ROWS);
            if (up) kt_add_bias(kt_bias_at(expert->up_bias, column), m, up, KT_PANEL_ROWS);
            activation(&(kt_activation){
                .function = function, .m = m, .gate = value, .up = up, .out = value, .out_pitch = KT_PANEL_ROWS});
            pass->kernels->split_bf16(m, value, h, kt_terms(pass->down) > 1 ? h + m * width : NULL, width);
            for (int64_t j = 0; group->bf16.h_sums && j < m * width; j += width)
                sum_activations(pass->kernels, rounds_h, KT_PANEL_ROWS, h + j,
                                &group->bf16.h_sums[(first + j) / KT_SUM_COLUMNS]);
            for (int64_t j = 0; rounds_h.once && j < m * width; j += width)
                pass->kernels->round_units(KT_PANEL_ROWS, h + j);
        }
    }
}

static void down(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch) {
    int64_t k = kt_get_width(pass, group, task), columns = pass->section_columns, terms = kt_terms(pass->down);
    const kt_bucket *bucket = &pass->bucket[task->bucket];
    const ktq_expert *expert = kt_get_expert(pass, group, task);
    float *y = kt_down_rows(pass, group, task);
    kt_bf16_panel panel[KT_MAX_PANELS];
    for (int64_t i = 0; i < task->count; i++) {
        int64_t index = task->section * (columns / KT_PANEL_ROWS) + task->first + kt_down_panel(task, i);
        panel[i] = kt_get_bf16_panel(pass->down, expert->down, expert->down_scale, k, index);
    }
    for (int64_t t = 0; t < bucket->m; t += KT_TOKEN_BLOCK) {
        int64_t m = bucket->m - t < KT_TOKEN_BLOCK ? bucket->m - t : KT_TOKEN_BLOCK;
        int64_t first = h_row(pass, task, bucket->first + t, k);
        const float *sums = group->bf16.h_sums ? group->bf16.h_sums + first / KT_SUM_COLUMNS : NULL;
        multiply(pass, choose_rounding(pass, 1), terms * m, k, group->bf16.h + first, sums, task->count,
                 panel, scratch);
        float *c = scratch->c;
        for (int64_t i = 0; i < task->count; i++, c += (terms - 1) * m * KT_PANEL_ROWS) {
            for (int64_t j = 0; terms > 1 && j < m * KT_PANEL_ROWS; j++) c[j] += c[m * KT_PANEL_ROWS + j];
            int64_t column = (task->first + kt_down_panel(task, i)) * KT_PANEL_ROWS;
            kt_add_bias(kt_bias_at(expert->down_bias, task->section * columns + column), m, c, KT_PANEL_ROWS);
            for (int64_t row = t; row < t + m; row++, c += KT_PANEL_ROWS)
                memcpy(y + row * columns + column, c, KT_PANEL_ROWS * sizeof *c);
        }
    }
}

const kt_arithmetic kt_bf16_arithmetic = {
    .a_bytes = 2, .h_bytes = 2, .allocate = allocate, .quantize = copy_token, .gate_up = gate_up, .down = down};
