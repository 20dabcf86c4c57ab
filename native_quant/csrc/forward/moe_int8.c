/* int8 arithmetic: activations of one scale per row, exact int32 sums (numerics.md, section 5). */
#include <string.h>

#include "moe.h"

/* Codes are coarse if their mean square is below COARSE, which is 12 * 12: of codes up to 127. A row's error reaches
 * the output times the weight of its expert, so this bound is scaled by the square of the weight (numerics.md, section
 * 5), within limits, because weights do not tell how large h is. */
enum { COARSE = 144, LEAST_COARSE = 81, MOST_COARSE = 156 };

static int64_t column_blocks(int64_t k) {
    return kt_blocks(k, KT_K_BLOCK);
}

/* The tiling that the kernel needs for the codes of a bucket: a call gets whole tiles. */
static kt_tiling tiling_of(const kt_pass *pass, int64_t bucket) {
    kt_tiling tiling = pass->kernels->tiling(pass->gate->bits, pass->bucket[bucket].m);
    tiling.tokens -= tiling.tokens % tiling.rows;
    return tiling;
}

/* The first row of a bucket's room in a and what goes with it, and in hq: the last tile may be longer than its rows. */
static int64_t a_row_of(const kt_pass *pass, int64_t bucket) {
    return pass->bucket[bucket].first + bucket * (KT_MOST_TILE_ROWS - 1);
}
static int64_t h_rows(const kt_pass *pass) {
    return 2 * pass->rows + pass->buckets * (KT_MOST_TILE_ROWS - 1);
}
static int64_t h_row_of(const kt_pass *pass, const kt_task *task) {
    return task->part * h_rows(pass) + 2 * pass->bucket[task->bucket].first +
           task->bucket * (KT_MOST_TILE_ROWS - 1);
}

/* A block: the tokens of a bucket that a call of the kernel gets. Where the one with token t begins, and its tokens. */
static int64_t block_start(kt_tiling tiling, int64_t t) {
    return t / tiling.tokens * tiling.tokens;
}
static int64_t block_tokens(const kt_bucket *bucket, kt_tiling tiling, int64_t t) {
    int64_t left = bucket->m - block_start(tiling, t);
    return left < tiling.tokens ? left : tiling.tokens;
}

/* The number of the block that holds token t of a bucket: no two blocks of a pass have the same one, since all but the
 * last of a bucket have LEAST_BLOCK rows or more. Numbers are below blocks_of(). */
enum { LEAST_BLOCK = KT_LEAST_TOKENS - KT_MOST_TILE_ROWS };
static int64_t block_of(const kt_pass *pass, int64_t bucket, kt_tiling tiling, int64_t t) {
    return bucket + (pass->bucket[bucket].first + block_start(tiling, t)) / LEAST_BLOCK;
}
static int64_t blocks_of(const kt_pass *pass) {
    return pass->buckets + pass->rows / LEAST_BLOCK;
}

static kt_code_row place_in(int8_t *tiles, int64_t rows, int64_t k, int64_t t) {
    return (kt_code_row){tiles + kt_in_tiles(rows, k, t), rows * 64};
}

static void allocate(const kt_pass *pass, kt_group *group, kt_arena *arena) {
    kt_int8_activations *rows = &group->int8;
    int64_t k = pass->moe->hidden, w = pass->width, blocks = group->parts * blocks_of(pass);
    int64_t a = pass->rows + pass->buckets * (KT_MOST_TILE_ROWS - 1), h = group->parts * h_rows(pass);
    KT_TAKE(rows->a, a * k);
    KT_TAKE(rows->a_scale, a);
    KT_TAKE(rows->a_sums, a * column_blocks(k));
    KT_TAKE(rows->coarse, pass->rows);
    KT_TAKE(rows->h, group->parts * pass->rows * w);
    KT_TAKE(rows->hq, h * w);
    KT_TAKE(rows->h_scale, h);
    KT_TAKE(rows->h_sums, h * column_blocks(w));
    KT_TAKE(rows->rest_of, h);
    KT_TAKE(rows->remainders, blocks);
    for (int64_t block = 0; arena->base && block < blocks; block++) rows->remainders[block] = 0;
}

/* What is coarse in the rows of a token: it knows its weights, and no other's. */
static void set_coarse(const kt_pass *pass, kt_group *group, int64_t token) {
    int64_t topk = pass->call->topk, experts = 0;
    const kt_pair *pair = pass->pair + token * topk;
    const float *weights = pass->call->weights + (pass->first_token + token) * topk;
    double squares = 0;
    for (int64_t j = 0; j < topk; j++) {
        if (pair[j].row < 0) continue;
        squares += (double)weights[j] * weights[j];
        experts++;
    }
    for (int64_t j = 0; j < topk; j++) {
        if (pair[j].row < 0) continue;
        double coarse = COARSE * ((double)weights[j] * weights[j]) * (double)experts / squares;
        coarse = coarse > LEAST_COARSE ? coarse : LEAST_COARSE; /* of 0 / 0, too */
        group->int8.coarse[pair[j].row] = coarse < MOST_COARSE ? coarse : MOST_COARSE;
    }
}

/* Quantized once, for the row of every expert. */
static void quantize(const kt_pass *pass, kt_group *group, int64_t token, const kt_worker_scratch *scratch) {
    const kt_int8_activations *rows = &group->int8;
    const kt_pair *pair = pass->pair + token * pass->call->topk;
    int64_t k = pass->moe->hidden, topk = pass->call->topk, sums = column_blocks(k), copies = 0, energy;
    const uint16_t *x = pass->call->hidden + (pass->first_token + token) * k;
    int32_t *first_sums = NULL;
    for (int64_t j = 0; j < topk; j++) {
        if (pair[j].row < 0) continue;
        int64_t first = a_row_of(pass, pair[j].bucket), t = pair[j].row - pass->bucket[pair[j].bucket].first;
        scratch->place[copies++] = place_in(rows->a + first * k, tiling_of(pass, pair[j].bucket).rows, k, t);
        if (!first_sums) first_sums = rows->a_sums + (first + t) * sums;
    }
    if (!copies) return;
    set_coarse(pass, group, token);
    float scale = pass->kernels->quantize_row(1, x, k, copies, scratch->place, first_sums, &energy);
    for (int64_t j = 0; j < topk; j++) {
        if (pair[j].row < 0) continue;
        int64_t row = a_row_of(pass, pair[j].bucket) + pair[j].row - pass->bucket[pair[j].bucket].first;
        rows->a_scale[row] = scale;
        if (rows->a_sums + row * sums != first_sums)
            memcpy(rows->a_sums + row * sums, first_sums, (size_t)sums * sizeof *first_sums);
    }
}

static void set_next(const kt_pass *pass, kt_gemm *job, const kt_panel *panel, int64_t k) {
    job->next = kt_panel_tiles(pass->gate->bits, panel, k, 0);
    job->next_bytes = kt_first_block_bytes(pass->gate->bits, k);
}

/* Sets job->next to the weights of the task that this thread takes next if all threads take them in turns. */
static void look_ahead(const kt_pass *pass, const kt_group *group, const kt_task *task, kt_gemm *job) {
    if (group->task + group->tasks - task <= group->threads) return;
    const kt_task *next = task + group->threads;
    const ktq_expert *expert = kt_expert_of(pass, group, next);
    int bits = pass->gate->bits;
    int64_t k = next->kind == KT_GATE_UP ? pass->moe->hidden : pass->width;
    kt_panel panel;
    if (next->kind == KT_GATE_UP) panel = kt_panel_of(bits, expert->gate, k, next->first);
    else if (next->kind == KT_DOWN) panel = kt_panel_of(bits, expert->down, k, kt_first_panel(pass, next));
    else return;
    set_next(pass, job, &panel, k);
}

/* Activations times panels, to job->c. is_last: another call with the same panels does not follow. Returns the unit of
 * the sums. */
static int multiply(const kt_pass *pass, const kt_group *group, const kt_task *task, const kt_worker_scratch *scratch,
                    int is_last, kt_gemm *job) {
    job->tile_rows = tiling_of(pass, task->bucket).rows;
    job->c = scratch->c;
    job->c_pitch = (job->m + KT_MOST_TILE_ROWS) * KT_PANEL_ROWS;
    job->sums_pitch = column_blocks(job->k);
    job->scratch = scratch->gemm;
    if (is_last) look_ahead(pass, group, task, job);
    else set_next(pass, job, &job->panel[0], job->k);
    return pass->gate->gemm(pass->kernels)(job);
}

/* A gate panel, its up panel, the next gate panel ...: two streams from memory. */
static void gate_up(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch) {
    const ktq_moe *moe = pass->moe;
    const kt_int8_activations *rows = &group->int8;
    const kt_bucket *bucket = &pass->bucket[task->bucket];
    const ktq_expert *expert = kt_expert_of(pass, group, task);
    const float *gate_scale = expert->gate_scale, *up_scale = expert->up_scale;
    int bits = pass->gate->bits;
    int64_t a_row = a_row_of(pass, task->bucket);
    kt_panel panel[KT_MAX_PANELS];
    for (int64_t i = 0; i < task->count; i++) {
        panel[2 * i] = kt_panel_of(bits, expert->gate, moe->hidden, task->first + i);
        panel[2 * i + 1] = kt_panel_of(bits, expert->up, moe->hidden, task->first + i);
    }
    const kt_tiling tiling = tiling_of(pass, task->bucket);
    for (int64_t t = 0; t < bucket->m; t += tiling.tokens) {
        int64_t m = block_tokens(bucket, tiling, t);
        kt_gemm job = {.m = m,
                       .k = moe->hidden,
                       .a = rows->a + (a_row + t) * moe->hidden,
                       .sums = rows->a_sums + (a_row + t) * column_blocks(moe->hidden),
                       .panels = 2 * task->count,
                       .panel = panel};
        int unit = multiply(pass, group, task, scratch, t + m == bucket->m, &job);
        for (int64_t i = 0; i < task->count; i++) {
            int64_t column = (task->first + i) * KT_PANEL_ROWS;
            pass->kernels->swiglu(
                &(kt_outputs){.exact = pass->call->exact,
                              .m = m,
                              .unit = (float)unit,
                              .token_scale = rows->a_scale + a_row + t,
                              .acc = {job.c + 2 * i * job.c_pitch, job.c + (2 * i + 1) * job.c_pitch},
                              .row_scale = {gate_scale + column, up_scale + column},
                              .out = rows->h + (task->part * pass->rows + bucket->first + t) * pass->width + column,
                              .out_pitch = pass->width});
        }
    }
}

/* The first row of the block that holds token t of a bucket, counted in hq. */
static int64_t h_block_of(const kt_pass *pass, const kt_task *task, kt_tiling tiling, int64_t t) {
    return h_row_of(pass, task) + 2 * block_start(tiling, t);
}

/* Rows of h as int8; in the default mode coarse ones get a second row for the remainder. */
static void requantize(const kt_pass *pass, kt_group *group, const kt_task *task) {
    kt_int8_activations *rows = &group->int8;
    int64_t k = pass->width, sums = column_blocks(k);
    const kt_bucket *bucket = &pass->bucket[task->bucket];
    const double *coarse = rows->coarse + bucket->first;
    const kt_tiling tiling = tiling_of(pass, task->bucket);
    for (int64_t t = task->first; t < task->first + task->count; t++) {
        const float *h = rows->h + (task->part * pass->rows + bucket->first + t) * k;
        int64_t first = h_block_of(pass, task, tiling, t), row = first + t % tiling.tokens, energy;
        int8_t *tiles = rows->hq + first * k;
        kt_code_row place = place_in(tiles, tiling.rows, k, t % tiling.tokens);
        float scale = pass->kernels->quantize_row(0, h, k, 1, &place, rows->h_sums + row * sums, &energy);
        float step = scale * KT_REMAINDER_UNIT;
        rows->h_scale[row] = scale;
        rows->rest_of[row] = 0;
        if (pass->call->exact || !(step > 0) || (double)energy >= coarse[t] * (double)k) continue;
        int64_t block = task->part * blocks_of(pass) + block_of(pass, task->bucket, tiling, t);
        int32_t rest = (int32_t)block_tokens(bucket, tiling, t) +
                       atomic_fetch_add_explicit(&rows->remainders[block], 1, memory_order_relaxed);
        int8_t *codes = place_in(tiles, tiling.rows, k, rest).q;
        pass->kernels->remainder(h, k, scale, step, place, codes, rows->h_sums + (first + rest) * sums);
        rows->h_scale[first + rest] = step;
        rows->rest_of[row] = rest;
    }
}

static void down(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch) {
    const kt_int8_activations *rows = &group->int8;
    const kt_bucket *bucket = &pass->bucket[task->bucket];
    const kt_tiling tiling = tiling_of(pass, task->bucket);
    const ktq_expert *expert = kt_expert_of(pass, group, task);
    const float *row_scale = expert->down_scale;
    int64_t first = kt_first_panel(pass, task), sums = column_blocks(pass->width);
    kt_panel panel[KT_MAX_PANELS];
    for (int64_t i = 0; i < task->count; i++)
        panel[i] = kt_panel_of(pass->gate->bits, expert->down, pass->width, first + kt_down_panel(task, i));
    float *y = kt_down_rows(pass, group, task);
    for (int64_t t = 0; t < bucket->m; t += tiling.tokens) {
        int64_t m = block_tokens(bucket, tiling, t);
        int64_t row = h_block_of(pass, task, tiling, t);
        int64_t block = task->part * blocks_of(pass) + block_of(pass, task->bucket, tiling, t);
        int remainders = atomic_load_explicit(&rows->remainders[block], memory_order_relaxed);
        kt_gemm job = {.m = m + remainders,
                       .k = pass->width,
                       .a = rows->hq + row * pass->width,
                       .sums = rows->h_sums + row * sums,
                       .panels = task->count,
                       .panel = panel};
        int unit = multiply(pass, group, task, scratch, t + m == bucket->m, &job);
        for (int64_t i = 0; i < task->count; i++) {
            int64_t place = kt_down_panel(task, i);
            pass->kernels->scale_rows(
                &(kt_outputs){.exact = pass->call->exact,
                              .m = m,
                              .unit = (float)unit,
                              .token_scale = rows->h_scale + row,
                              .acc = {job.c + i * job.c_pitch},
                              .row_scale = {row_scale + (first + place) * KT_PANEL_ROWS},
                              .out = y + t * pass->section_columns + (task->first + place) * KT_PANEL_ROWS,
                              .out_pitch = pass->section_columns,
                              .rest = rows->rest_of + row});
        }
    }
}

const kt_arithmetic kt_int8_arithmetic = {
    .a_bytes = 1, .h_bytes = 6, .allocate = allocate, .quantize = quantize, .gate_up = gate_up,
    .requantize = requantize, .down = down};
