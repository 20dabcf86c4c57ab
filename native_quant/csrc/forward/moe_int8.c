/* int8 arithmetic: activations of one scale per row, exact int32 sums (NUMERICS.md, section 5). */
#include <string.h>

#include "moe.h"

static int64_t column_blocks(int64_t k) {
    return kt_blocks(k, KT_K_BLOCK);
}

/* The first row of a bucket in hq and what goes with it. */
static int64_t h_row_of(const kt_pass *pass, const kt_task *task) {
    return 2 * (task->part * pass->rows + pass->bucket[task->bucket].first);
}

static void lay_out(const kt_pass *pass, kt_group *group, kt_arena *arena) {
    kt_int8_activations *rows = &group->int8;
    int64_t k = pass->moe->hidden, w = pass->moe->width, cells = group->parts * pass->buckets;
    int64_t a_rows = pass->rows + 32, h_rows = group->parts * 2 * pass->rows + 32; /* kernels read whole tiles */
    KT_TAKE(rows->a, a_rows * k);
    KT_TAKE(rows->a_scale, a_rows);
    KT_TAKE(rows->a_sums, a_rows * column_blocks(k));
    KT_TAKE(rows->h, group->parts * pass->rows * w);
    KT_TAKE(rows->hq, h_rows * w);
    KT_TAKE(rows->h_scale, h_rows);
    KT_TAKE(rows->h_sums, h_rows * column_blocks(w));
    KT_TAKE(rows->remainder_of, h_rows);
    KT_TAKE(rows->remainders, cells);
    for (int64_t cell = 0; arena->base && cell < cells; cell++) rows->remainders[cell] = 0;
}

/* Quantized once, copied to the row of every expert. */
static void quantize(const kt_pass *pass, kt_group *group, int64_t token) {
    const kt_int8_activations *rows = &group->int8;
    int64_t k = pass->moe->hidden, topk = pass->call->topk, sums = column_blocks(k), made = -1;
    const uint16_t *x = pass->call->hidden + (pass->first_token + token) * k;
    for (int64_t j = 0; j < topk; j++) {
        int64_t row = pass->row_of[token * topk + j];
        if (row < 0) continue;
        if (made < 0) {
            rows->a_scale[row] = pass->kernels->quantize_row(1, x, k, rows->a + row * k, rows->a_sums + row * sums);
            made = row;
            continue;
        }
        memcpy(rows->a + row * k, rows->a + made * k, (size_t)k);
        memcpy(rows->a_sums + row * sums, rows->a_sums + made * sums, (size_t)sums * sizeof *rows->a_sums);
        rows->a_scale[row] = rows->a_scale[made];
    }
}

/* A gate strip, its up strip, the next gate strip ...: two streams from memory. */
static void gate_up(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch) {
    const ktq_moe *moe = pass->moe;
    const kt_int8_activations *rows = &group->int8;
    const kt_bucket *bucket = &pass->bucket[task->bucket];
    const ktq_expert *expert = kt_expert_of(pass, group, task);
    const float *gate_scale = expert->gate_scale, *up_scale = expert->up_scale;
    int bits = pass->format->bits;
    int32_t *c = scratch->c;
    kt_strip strip[KT_MAX_STRIPS];
    for (int64_t i = 0; i < task->count; i++) {
        strip[2 * i] = kt_strip_of(bits, expert->gate, moe->hidden, task->first + i);
        strip[2 * i + 1] = kt_strip_of(bits, expert->up, moe->hidden, task->first + i);
    }
    for (int64_t t = 0; t < bucket->m; t += KT_TOKEN_BLOCK) {
        int64_t row = bucket->first + t, m = bucket->m - t < KT_TOKEN_BLOCK ? bucket->m - t : KT_TOKEN_BLOCK;
        int64_t c_pitch = kt_blocks(m, 32) * 32 * KT_STRIP_ROWS;
        pass->format->gemm(pass->kernels)(&(kt_gemm){.m = m,
                                                     .k = moe->hidden,
                                                     .a = rows->a + row * moe->hidden,
                                                     .a_pitch = moe->hidden,
                                                     .sums = rows->a_sums + row * column_blocks(moe->hidden),
                                                     .sums_pitch = column_blocks(moe->hidden),
                                                     .strips = 2 * task->count,
                                                     .strip = strip,
                                                     .c = c,
                                                     .c_pitch = c_pitch,
                                                     .scratch = scratch->gemm});
        for (int64_t i = 0; i < task->count; i++) {
            int64_t column = (task->first + i) * KT_STRIP_ROWS;
            pass->kernels->swiglu(
                &(kt_outputs){.exact = pass->call->exact,
                              .m = m,
                              .unit = pass->format->geometry->unit,
                              .token_scale = rows->a_scale + row,
                              .acc = {c + 2 * i * c_pitch, c + (2 * i + 1) * c_pitch},
                              .row_scale = {gate_scale + column, up_scale + column},
                              .out = rows->h + (task->part * pass->rows + row) * moe->width + column,
                              .out_pitch = moe->width});
        }
    }
}

/* Rows of h as int8; in the default mode coarse ones get a second row for the remainder. */
static void requantize(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch) {
    kt_int8_activations *rows = &group->int8;
    int64_t k = pass->moe->width, sums = column_blocks(k), cell = task->part * pass->buckets + task->bucket;
    const kt_bucket *bucket = &pass->bucket[task->bucket];
    const float *h = rows->h + (task->part * pass->rows + bucket->first) * k;
    int64_t first = h_row_of(pass, task);
    for (int64_t t = task->first; t < task->first + task->count; t++) {
        int64_t row = first + t;
        int8_t *q = rows->hq + row * k;
        rows->h_scale[row] = pass->kernels->quantize_row(0, h + t * k, k, q, rows->h_sums + row * sums);
        if (pass->call->exact) continue;
        int8_t *left = (int8_t *)scratch->gemm;
        int32_t left_sums[KT_MAX_COLUMNS / KT_K_BLOCK + 1];
        float step = pass->kernels->remainder(h + t * k, k, rows->h_scale[row], q, left, left_sums);
        if (step == 0) continue;
        int64_t next = first + bucket->m + atomic_fetch_add_explicit(&rows->remainders[cell], 1, memory_order_relaxed);
        memcpy(rows->hq + next * k, left, (size_t)k);
        memcpy(rows->h_sums + next * sums, left_sums, (size_t)sums * sizeof *left_sums);
        rows->h_scale[next] = step;
        rows->remainder_of[next] = t;
    }
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
    const kt_int8_activations *rows = &group->int8;
    const kt_bucket *bucket = &pass->bucket[task->bucket];
    const ktq_expert *expert = kt_expert_of(pass, group, task);
    const float *row_scale = expert->down_scale;
    int64_t h_row = h_row_of(pass, task), first = task->panel * (pass->panel_columns / KT_STRIP_ROWS) + task->first;
    int32_t *c = scratch->c;
    kt_strip strip[KT_MAX_STRIPS];
    for (int64_t i = 0; i < task->count; i++)
        strip[i] = kt_strip_of(pass->format->bits, expert->down, moe->width, first + kt_down_strip(task, i));
    int64_t cell = task->part * pass->buckets + task->bucket;
    int64_t all = bucket->m + atomic_load_explicit(&rows->remainders[cell], memory_order_relaxed);
    float *y = kt_down_rows(pass, group, task);
    for (int64_t t = 0; t < all; t += KT_TOKEN_BLOCK) {
        int64_t m = all - t < KT_TOKEN_BLOCK ? all - t : KT_TOKEN_BLOCK;
        int64_t c_pitch = kt_blocks(m, 32) * 32 * KT_STRIP_ROWS;
        int64_t whole = bucket->m < t ? 0 : bucket->m - t < m ? bucket->m - t : m; /* then come remainders */
        pass->format->gemm(pass->kernels)(&(kt_gemm){.m = m,
                                                     .k = moe->width,
                                                     .a = rows->hq + (h_row + t) * moe->width,
                                                     .a_pitch = moe->width,
                                                     .sums = rows->h_sums + (h_row + t) * column_blocks(moe->width),
                                                     .sums_pitch = column_blocks(moe->width),
                                                     .strips = task->count,
                                                     .strip = strip,
                                                     .c = c,
                                                     .c_pitch = c_pitch,
                                                     .scratch = scratch->gemm});
        for (int64_t i = 0; i < task->count; i++) {
            int64_t place = kt_down_strip(task, i);
            float *columns = y + (task->first + place) * KT_STRIP_ROWS;
            kt_outputs job = {.exact = pass->call->exact,
                              .m = whole,
                              .unit = pass->format->geometry->unit,
                              .token_scale = rows->h_scale + h_row + t,
                              .acc = {c + i * c_pitch},
                              .row_scale = {row_scale + (first + place) * KT_STRIP_ROWS},
                              .out = columns + t * pass->panel_columns,
                              .out_pitch = pass->panel_columns};
            if (whole) pass->kernels->scale_rows(&job);
            job.m = m - whole;
            job.token_scale += whole;
            job.acc[0] += whole * KT_STRIP_ROWS;
            if (job.m) add_remainders(pass, job, rows->remainder_of + h_row + t + whole, columns, pass->panel_columns);
        }
    }
}

const kt_arithmetic kt_int8_arithmetic = {
    .a_bytes = 1, .h_bytes = 6, .lay_out = lay_out, .quantize = quantize, .gate_up = gate_up, .requantize = requantize,
    .down = down};
