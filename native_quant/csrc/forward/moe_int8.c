/* int8 arithmetic: activations of one scale per row, exact int32 sums (NUMERICS.md, section 5). */
#include <string.h>

#include "moe.h"

static int64_t column_blocks(int64_t k) {
    return kt_blocks(k, KT_K_BLOCK);
}

/* How the kernel wants the codes of a bucket. */
static kt_tiling tiling_of(const kt_pass *pass, int64_t bucket) {
    return pass->kernels->tiling(pass->format->bits, pass->bucket[bucket].m);
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

static kt_code_row place_in(int8_t *tiles, int64_t rows, int64_t k, int64_t t) {
    return (kt_code_row){tiles + kt_in_tiles(rows, k, t), rows * 64};
}

static void lay_out(const kt_pass *pass, kt_group *group, kt_arena *arena) {
    kt_int8_activations *rows = &group->int8;
    int64_t k = pass->moe->hidden, w = pass->moe->width, cells = group->parts * pass->buckets;
    int64_t a = pass->rows + pass->buckets * (KT_MOST_TILE_ROWS - 1), h = group->parts * h_rows(pass);
    KT_TAKE(rows->a, a * k);
    KT_TAKE(rows->a_scale, a);
    KT_TAKE(rows->a_sums, a * column_blocks(k));
    KT_TAKE(rows->h, group->parts * pass->rows * w);
    KT_TAKE(rows->hq, h * w);
    KT_TAKE(rows->h_scale, h);
    KT_TAKE(rows->h_sums, h * column_blocks(w));
    KT_TAKE(rows->remainder_of, h);
    KT_TAKE(rows->remainders, cells);
    for (int64_t cell = 0; arena->base && cell < cells; cell++) rows->remainders[cell] = 0;
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
    float scale = pass->kernels->quantize_row(1, x, k, copies, scratch->place, first_sums, &energy);
    for (int64_t j = 0; j < topk; j++) {
        if (pair[j].row < 0) continue;
        int64_t row = a_row_of(pass, pair[j].bucket) + pair[j].row - pass->bucket[pair[j].bucket].first;
        rows->a_scale[row] = scale;
        if (rows->a_sums + row * sums != first_sums)
            memcpy(rows->a_sums + row * sums, first_sums, (size_t)sums * sizeof *first_sums);
    }
}

/* Sets job->next to the weights of the task that this thread takes next if all threads take them in turns. */
static void look_ahead(const kt_pass *pass, const kt_group *group, const kt_task *task, kt_gemm *job) {
    const kt_task *next = task + group->threads;
    if (next >= group->task + group->tasks) return;
    const ktq_expert *expert = kt_expert_of(pass, group, next);
    int bits = pass->format->bits;
    int64_t k = next->kind == KT_GATE_UP ? pass->moe->hidden : pass->moe->width;
    kt_strip strip;
    if (next->kind == KT_GATE_UP) strip = kt_strip_of(bits, expert->gate, k, next->first);
    else if (next->kind == KT_DOWN) strip = kt_strip_of(bits, expert->down, k, kt_first_strip(pass, next));
    else return;
    job->next = kt_strip_tiles(bits, &strip, k, 0);
    job->next_bytes = (k < KT_K_BLOCK ? k : KT_K_BLOCK) * KT_STRIP_ROWS * bits / 8;
}

/* Tokens `first` .. of a bucket times the strips, as many as go through the kernel at a time: to job->c. `all`: the
 * bucket's. Returns the unit of the sums; job->m becomes the number of tokens. */
static int multiply(const kt_pass *pass, const kt_group *group, const kt_task *task, const kt_worker_scratch *scratch,
                    int64_t first, int64_t all, kt_gemm *job) {
    kt_tiling tiling = tiling_of(pass, task->bucket);
    int64_t most = tiling.tokens / tiling.rows * tiling.rows;
    job->m = all - first < most ? all - first : most;
    job->tile_rows = tiling.rows;
    job->c = scratch->c;
    job->c_pitch = (job->m + KT_MOST_TILE_ROWS) * KT_STRIP_ROWS;
    job->sums_pitch = column_blocks(job->k);
    job->scratch = scratch->gemm;
    if (first + job->m < all) {
        job->next = kt_strip_tiles(pass->format->bits, &job->strip[0], job->k, 0);
        job->next_bytes = (job->k < KT_K_BLOCK ? job->k : KT_K_BLOCK) * KT_STRIP_ROWS * pass->format->bits / 8;
    } else {
        look_ahead(pass, group, task, job);
    }
    return pass->format->gemm(pass->kernels)(job);
}

/* A gate strip, its up strip, the next gate strip ...: two streams from memory. */
static void gate_up(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch) {
    const ktq_moe *moe = pass->moe;
    const kt_int8_activations *rows = &group->int8;
    const kt_bucket *bucket = &pass->bucket[task->bucket];
    const ktq_expert *expert = kt_expert_of(pass, group, task);
    const float *gate_scale = expert->gate_scale, *up_scale = expert->up_scale;
    int bits = pass->format->bits;
    int64_t a_row = a_row_of(pass, task->bucket);
    kt_strip strip[KT_MAX_STRIPS];
    for (int64_t i = 0; i < task->count; i++) {
        strip[2 * i] = kt_strip_of(bits, expert->gate, moe->hidden, task->first + i);
        strip[2 * i + 1] = kt_strip_of(bits, expert->up, moe->hidden, task->first + i);
    }
    for (int64_t t = 0, m; t < bucket->m; t += m) {
        kt_gemm job = {.k = moe->hidden,
                       .a = rows->a + (a_row + t) * moe->hidden,
                       .sums = rows->a_sums + (a_row + t) * column_blocks(moe->hidden),
                       .strips = 2 * task->count,
                       .strip = strip};
        int unit = multiply(pass, group, task, scratch, t, bucket->m, &job);
        m = job.m;
        for (int64_t i = 0; i < task->count; i++) {
            int64_t column = (task->first + i) * KT_STRIP_ROWS;
            pass->kernels->swiglu(
                &(kt_outputs){.exact = pass->call->exact,
                              .m = m,
                              .unit = (float)unit,
                              .token_scale = rows->a_scale + a_row + t,
                              .acc = {job.c + 2 * i * job.c_pitch, job.c + (2 * i + 1) * job.c_pitch},
                              .row_scale = {gate_scale + column, up_scale + column},
                              .out = rows->h + (task->part * pass->rows + bucket->first + t) * moe->width + column,
                              .out_pitch = moe->width});
        }
    }
}

/* Rows of h as int8; in the default mode coarse ones get a second row for the remainder. */
static void requantize(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch) {
    (void)scratch;
    kt_int8_activations *rows = &group->int8;
    int64_t k = pass->moe->width, sums = column_blocks(k), cell = task->part * pass->buckets + task->bucket;
    const kt_bucket *bucket = &pass->bucket[task->bucket];
    const float *h = rows->h + (task->part * pass->rows + bucket->first) * k;
    int64_t first = h_row_of(pass, task), tile_rows = tiling_of(pass, task->bucket).rows;
    int8_t *tiles = rows->hq + first * k;
    for (int64_t t = task->first; t < task->first + task->count; t++) {
        kt_code_row place = place_in(tiles, tile_rows, k, t);
        int64_t row = first + t, energy;
        float scale =
            pass->kernels->quantize_row(0, h + t * k, k, 1, &place, rows->h_sums + row * sums, &energy);
        float step = scale * KT_REMAINDER_UNIT;
        rows->h_scale[row] = scale;
        if (pass->call->exact || !(step > 0) || energy >= KT_COARSE_ENERGY * k) continue;
        int64_t at = bucket->m + atomic_fetch_add_explicit(&rows->remainders[cell], 1, memory_order_relaxed);
        int8_t *rest = place_in(tiles, tile_rows, k, at).q;
        pass->kernels->remainder(h + t * k, k, scale, step, place, rest, rows->h_sums + (first + at) * sums);
        rows->h_scale[first + at] = step;
        rows->remainder_of[first + at] = t;
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
    int64_t h_row = h_row_of(pass, task), first = kt_first_strip(pass, task);
    kt_strip strip[KT_MAX_STRIPS];
    for (int64_t i = 0; i < task->count; i++)
        strip[i] = kt_strip_of(pass->format->bits, expert->down, moe->width, first + kt_down_strip(task, i));
    int64_t cell = task->part * pass->buckets + task->bucket;
    int64_t all = bucket->m + atomic_load_explicit(&rows->remainders[cell], memory_order_relaxed);
    float *y = kt_down_rows(pass, group, task);
    for (int64_t t = 0, m; t < all; t += m) {
        kt_gemm job = {.k = moe->width,
                       .a = rows->hq + (h_row + t) * moe->width,
                       .sums = rows->h_sums + (h_row + t) * column_blocks(moe->width),
                       .strips = task->count,
                       .strip = strip};
        int unit = multiply(pass, group, task, scratch, t, all, &job);
        m = job.m;
        int64_t whole = bucket->m < t ? 0 : bucket->m - t < m ? bucket->m - t : m; /* then come remainders */
        for (int64_t i = 0; i < task->count; i++) {
            int64_t place = kt_down_strip(task, i);
            float *columns = y + (task->first + place) * KT_STRIP_ROWS;
            kt_outputs outputs = {.exact = pass->call->exact,
                                  .m = whole,
                                  .unit = (float)unit,
                                  .token_scale = rows->h_scale + h_row + t,
                                  .acc = {job.c + i * job.c_pitch},
                                  .row_scale = {row_scale + (first + place) * KT_STRIP_ROWS},
                                  .out = columns + t * pass->panel_columns,
                                  .out_pitch = pass->panel_columns};
            if (whole) pass->kernels->scale_rows(&outputs);
            outputs.m = m - whole;
            outputs.token_scale += whole;
            outputs.acc[0] += whole * KT_STRIP_ROWS;
            if (outputs.m)
                add_remainders(pass, outputs, rows->remainder_of + h_row + t + whole, columns, pass->panel_columns);
        }
    }
}

const kt_arithmetic kt_int8_arithmetic = {
    .a_bytes = 1, .h_bytes = 6, .lay_out = lay_out, .quantize = quantize, .gate_up = gate_up, .requantize = requantize,
    .down = down};
