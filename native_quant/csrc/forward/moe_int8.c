/* int8 arithmetic: activations with one scale for each row, exact int32 sums (numerics.md, section 5). */
#include <string.h>

#include "bf16.h"
#include "moe.h"

/* Codes (up to 127) are coarse if their mean square is below COARSE = 12 * 12. The router weight multiplies a row's
 * error, so this bound is scaled by the square of the weight (numerics.md, section 5). The scaling is limited, because
 * weights do not tell how large h is. */
enum { COARSE = 144, LEAST_COARSE = 81, MOST_COARSE = 156 };

static int64_t column_blocks(int64_t k) {
    return kt_ceil_divide(k, KT_K_BLOCK);
}

/* The tiling of a bucket's codes. Each call of the kernel gets whole tiles. */
static kt_tiling get_tiling(const kt_pass *pass, int64_t bucket) {
    kt_tiling tiling = pass->kernels->tiling(pass->gate->bits, pass->bucket[bucket].m);
    tiling.tokens -= tiling.tokens % tiling.rows;
    return tiling;
}

/* First rows of a bucket in a, a_scale and a_sums, and in hq. Each bucket has space for a whole last tile. */
static int64_t first_a_row(const kt_pass *pass, int64_t bucket) {
    return pass->bucket[bucket].first + bucket * (KT_MAX_TILE_ROWS - 1);
}
static int64_t h_rows(const kt_pass *pass) {
    return 2 * pass->rows + pass->buckets * (KT_MAX_TILE_ROWS - 1);
}
static int64_t first_h_row(const kt_pass *pass, const kt_task *task) {
    return task->slice * h_rows(pass) + 2 * pass->bucket[task->bucket].first + task->bucket * (KT_MAX_TILE_ROWS - 1);
}

/* First token, and number of tokens, of the block that holds token t. A block has the tokens of one call of the
 * kernel. */
static int64_t block_start(kt_tiling tiling, int64_t t) {
    return t / tiling.tokens * tiling.tokens;
}
static int64_t block_tokens(const kt_bucket *bucket, kt_tiling tiling, int64_t t) {
    int64_t remaining = bucket->m - block_start(tiling, t);
    return remaining < tiling.tokens ? remaining : tiling.tokens;
}

/* Number of the block that holds token t of a bucket, below count_blocks(). Numbers of a pass are unique, because only
 * the last block of a bucket may have fewer than LEAST_BLOCK rows. */
enum { LEAST_BLOCK = KT_MIN_TOKENS - KT_MAX_TILE_ROWS };
static int64_t block_number(const kt_pass *pass, int64_t bucket, kt_tiling tiling, int64_t t) {
    return bucket + (pass->bucket[bucket].first + block_start(tiling, t)) / LEAST_BLOCK;
}
static int64_t count_blocks(const kt_pass *pass) {
    return pass->buckets + pass->rows / LEAST_BLOCK;
}

static kt_code_row locate_codes(int8_t *tiles, int64_t rows, int64_t k, int64_t t) {
    return (kt_code_row){tiles + kt_tile_offset(rows, k, t), rows * 64};
}

static void allocate(const kt_pass *pass, kt_group *group, kt_arena *arena) {
    kt_int8_activations *rows = &group->int8;
    int64_t k = pass->moe->hidden, w = pass->width, blocks = group->slices * count_blocks(pass);
    int64_t a = pass->rows + pass->buckets * (KT_MAX_TILE_ROWS - 1), h = group->slices * h_rows(pass);
    KT_ALLOCATE(rows->a, a * k);
    KT_ALLOCATE(rows->a_scale, a);
    KT_ALLOCATE(rows->a_sums, a * column_blocks(k));
    KT_ALLOCATE(rows->coarse, pass->rows);
    KT_ALLOCATE(rows->h, group->slices * pass->rows * w);
    KT_ALLOCATE(rows->hq, h * w);
    KT_ALLOCATE(rows->h_scale, h);
    KT_ALLOCATE(rows->h_sums, h * column_blocks(w));
    KT_ALLOCATE(rows->remainder_row, h);
    KT_ALLOCATE(rows->remainders, blocks);
    for (int64_t block = 0; arena->base && block < blocks; block++) rows->remainders[block] = 0;
}

/* Sets the bound of coarse codes for the rows of a token, from its router weights. */
static void set_coarse(const kt_pass *pass, kt_group *group, int64_t token) {
    int64_t topk = pass->call->topk, experts = 0;
    const kt_pair *pair = pass->pair + token * topk;
    const float *weights = pass->call->weights + (pass->first_token + token) * topk;
    double squares = 0;
    for (int64_t j = 0; j < topk; j++) {
        if (pair[j].row < 0) continue;
        double weight = kt_output_weight(pass->moe, weights[j]);
        squares += weight * weight;
        experts++;
    }
    for (int64_t j = 0; j < topk; j++) {
        if (pair[j].row < 0) continue;
        double weight = kt_output_weight(pass->moe, weights[j]);
        double coarse = COARSE * (weight * weight) * (double)experts / squares;
        coarse = coarse > LEAST_COARSE ? coarse : LEAST_COARSE; /* also if coarse is NaN (0 / 0) */
        group->int8.coarse[pair[j].row] = coarse < MOST_COARSE ? coarse : MOST_COARSE;
    }
}

/* Quantizes a token once, and writes it to its row of every expert. */
static void quantize(const kt_pass *pass, kt_group *group, int64_t token, const kt_worker_scratch *scratch) {
    const kt_int8_activations *rows = &group->int8;
    const kt_pair *pair = pass->pair + token * pass->call->topk;
    int64_t k = pass->moe->hidden, topk = pass->call->topk, sums = column_blocks(k), copies = 0, energy;
    const uint16_t *x = pass->call->hidden + (pass->first_token + token) * k;
    int32_t *first_sums = NULL;
    for (int64_t j = 0; j < topk; j++) {
        if (pair[j].row < 0) continue;
        int64_t first = first_a_row(pass, pair[j].bucket), t = pair[j].row - pass->bucket[pair[j].bucket].first;
        scratch->place[copies++] = locate_codes(rows->a + first * k, get_tiling(pass, pair[j].bucket).rows, k, t);
        if (!first_sums) first_sums = rows->a_sums + (first + t) * sums;
    }
    if (!copies) return;
    set_coarse(pass, group, token);
    float scale = pass->kernels->quantize_row(1, x, k, copies, scratch->place, first_sums, &energy);
    for (int64_t j = 0; j < topk; j++) {
        if (pair[j].row < 0) continue;
        int64_t row = first_a_row(pass, pair[j].bucket) + pair[j].row - pass->bucket[pair[j].bucket].first;
        float weight = pass->call->weights[(pass->first_token + token) * topk + j];
        rows->a_scale[row] = pass->moe->function.weights_on_input ? scale * weight : scale;
        if (rows->a_sums + row * sums != first_sums)
            memcpy(rows->a_sums + row * sums, first_sums, (size_t)sums * sizeof *first_sums);
    }
}

static void set_next(const kt_pass *pass, kt_gemm *job, const kt_panel *panel, int64_t k) {
    job->next = kt_panel_tiles(pass->gate->bits, panel, k, 0);
    job->next_bytes = kt_first_block_bytes(pass->gate->bits, k);
}

/* Sets job->next to the weights of the task that this thread runs next if threads take tasks in turn. */
static void set_next_task(const kt_pass *pass, const kt_group *group, const kt_task *task, kt_gemm *job) {
    if (group->task + group->tasks - task <= group->threads) return;
    const kt_task *next = task + group->threads;
    const ktq_expert *expert = kt_get_expert(pass, group, next);
    int bits = pass->gate->bits;
    int64_t k = next->kind == KT_GATE_UP ? pass->moe->hidden : pass->width;
    kt_panel panel;
    const void *codes = pass->moe->function.ungated ? expert->up : expert->gate;
    if (next->kind == KT_GATE_UP) panel = kt_get_panel(bits, codes, k, next->first);
    else if (next->kind == KT_DOWN) panel = kt_get_panel(bits, expert->down, k, kt_first_panel(pass, next));
    else return;
    set_next(pass, job, &panel, k);
}

/* Multiplies activations with panels, to job->c. is_last: no other call with these panels follows. Returns the unit of
 * the sums. */
static int multiply(const kt_pass *pass, const kt_group *group, const kt_task *task, const kt_worker_scratch *scratch,
                    int is_last, kt_gemm *job) {
    job->tile_rows = get_tiling(pass, task->bucket).rows;
    job->c = scratch->c;
    job->c_pitch = (job->m + KT_MAX_TILE_ROWS) * KT_PANEL_ROWS;
    job->sums_pitch = column_blocks(job->k);
    job->scratch = scratch->gemm;
    if (is_last) set_next_task(pass, group, task, job);
    else set_next(pass, job, &job->panel[0], job->k);
    return pass->gate->gemm(pass->kernels)(job);
}

/* Writes the activation of m rows of products of gate and up to h. Without a gate: that of up, given as `gate`, with
   `up` NULL. */
static void activate(const kt_pass *pass, int64_t m, float *gate, float *up, float *h) {
    kt_activation_of(pass->kernels, pass->moe->function.activation)(&(kt_activation){
        .function = &pass->moe->function, .m = m, .gate = gate, .up = up, .out = h, .out_pitch = pass->width});
    for (int64_t t = 0; pass->call->exact && t < m; t++)
        for (int64_t r = t * pass->width; r < t * pass->width + KT_PANEL_ROWS; r++)
            h[r] = kt_from_bf16(kt_to_bf16(h[r]));
}

/* Alternates gate panels and up panels, for two streams from memory. */
static void gate_up(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch) {
    const ktq_moe *moe = pass->moe;
    const kt_int8_activations *rows = &group->int8;
    const kt_bucket *bucket = &pass->bucket[task->bucket];
    const ktq_expert *expert = kt_get_expert(pass, group, task);
    /* Gate and up, or only up. */
    int64_t sides = kt_sides(moe), last = sides - 1;
    const void *const codes[] = {sides > 1 ? expert->gate : expert->up, expert->up};
    const float *const scale[] = {sides > 1 ? expert->gate_scale : expert->up_scale, expert->up_scale};
    const float *const bias[] = {sides > 1 ? expert->gate_bias : expert->up_bias, expert->up_bias};
    int bits = pass->gate->bits;
    int64_t a_row = first_a_row(pass, task->bucket);
    kt_panel panel[KT_MAX_PANELS];
    for (int64_t i = 0; i < sides * task->count; i++)
        panel[i] = kt_get_panel(bits, codes[i % sides], moe->hidden, task->first + i / sides);
    const kt_tiling tiling = get_tiling(pass, task->bucket);
    for (int64_t t = 0; t < bucket->m; t += tiling.tokens) {
        int64_t m = block_tokens(bucket, tiling, t);
        kt_gemm job = {.m = m,
                       .k = moe->hidden,
                       .a = rows->a + (a_row + t) * moe->hidden,
                       .sums = rows->a_sums + (a_row + t) * column_blocks(moe->hidden),
                       .panels = sides * task->count,
                       .panel = panel};
        int unit = multiply(pass, group, task, scratch, t + m == bucket->m, &job);
        for (int64_t i = 0; i < task->count; i++) {
            int64_t column = (task->first + i) * KT_PANEL_ROWS;
            float *product[2];
            for (int side = 0; side < sides; side++) {
                int32_t *acc = job.c + (sides * i + side) * job.c_pitch;
                product[side] = (float *)acc;
                pass->kernels->scale_rows(&(kt_outputs){.exact = pass->call->exact,
                                                        .m = m,
                                                        .unit = (float)unit,
                                                        .token_scale = rows->a_scale + a_row + t,
                                                        .acc = acc,
                                                        .row_scale = scale[side] + column,
                                                        .out = product[side],
                                                        .out_pitch = KT_PANEL_ROWS});
                kt_add_bias(kt_bias_at(bias[side], column), m, product[side], KT_PANEL_ROWS);
            }
            activate(pass, m, product[0], last ? product[1] : NULL,
                     rows->h + (task->slice * pass->rows + bucket->first + t) * pass->width + column);
        }
    }
}

/* First row, in hq, of the block that holds token t of a bucket. */
static int64_t first_block_row(const kt_pass *pass, const kt_task *task, kt_tiling tiling, int64_t t) {
    return first_h_row(pass, task) + 2 * block_start(tiling, t);
}

/* Quantizes rows of h to int8. In the default mode coarse rows get a second row for the remainder. */
static void requantize(const kt_pass *pass, kt_group *group, const kt_task *task) {
    kt_int8_activations *rows = &group->int8;
    int64_t k = pass->width, sums = column_blocks(k);
    const kt_bucket *bucket = &pass->bucket[task->bucket];
    const double *coarse = rows->coarse + bucket->first;
    const kt_tiling tiling = get_tiling(pass, task->bucket);
    for (int64_t t = task->first; t < task->first + task->count; t++) {
        const float *h = rows->h + (task->slice * pass->rows + bucket->first + t) * k;
        int64_t first = first_block_row(pass, task, tiling, t), row = first + t % tiling.tokens, energy;
        int8_t *tiles = rows->hq + first * k;
        kt_code_row place = locate_codes(tiles, tiling.rows, k, t % tiling.tokens);
        float scale = pass->kernels->quantize_row(0, h, k, 1, &place, rows->h_sums + row * sums, &energy);
        float step = scale * KT_REMAINDER_UNIT;
        rows->h_scale[row] = scale;
        rows->remainder_row[row] = 0;
        if (pass->call->exact || !(step > 0) || (double)energy >= coarse[t] * (double)k) continue;
        int64_t block = task->slice * count_blocks(pass) + block_number(pass, task->bucket, tiling, t);
        int32_t remainder = (int32_t)block_tokens(bucket, tiling, t) +
                            atomic_fetch_add_explicit(&rows->remainders[block], 1, memory_order_relaxed);
        int8_t *codes = locate_codes(tiles, tiling.rows, k, remainder).q;
        pass->kernels->remainder(h, k, scale, step, place, codes, rows->h_sums + (first + remainder) * sums);
        rows->h_scale[first + remainder] = step;
        rows->remainder_row[row] = remainder;
    }
}

static void down(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch) {
    const kt_int8_activations *rows = &group->int8;
    const kt_bucket *bucket = &pass->bucket[task->bucket];
    const kt_tiling tiling = get_tiling(pass, task->bucket);
    const ktq_expert *expert = kt_get_expert(pass, group, task);
    const float *row_scale = expert->down_scale;
    int64_t first = kt_first_panel(pass, task), sums = column_blocks(pass->width);
    kt_panel panel[KT_MAX_PANELS];
    for (int64_t i = 0; i < task->count; i++)
        panel[i] = kt_get_panel(pass->gate->bits, expert->down, pass->width, first + kt_down_panel(task, i));
    float *y = kt_down_rows(pass, group, task);
    for (int64_t t = 0; t < bucket->m; t += tiling.tokens) {
        int64_t m = block_tokens(bucket, tiling, t);
        int64_t row = first_block_row(pass, task, tiling, t);
        int64_t block = task->slice * count_blocks(pass) + block_number(pass, task->bucket, tiling, t);
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
            int64_t column = (first + place) * KT_PANEL_ROWS;
            float *out = y + t * pass->section_columns + (task->first + place) * KT_PANEL_ROWS;
            pass->kernels->scale_rows(&(kt_outputs){.exact = pass->call->exact,
                                                    .m = m,
                                                    .unit = (float)unit,
                                                    .token_scale = rows->h_scale + row,
                                                    .acc = job.c + i * job.c_pitch,
                                                    .row_scale = row_scale + column,
                                                    .out = out,
                                                    .out_pitch = pass->section_columns,
                                                    .remainder_row = rows->remainder_row + row});
            kt_add_bias(kt_bias_at(expert->down_bias, column), m, out, pass->section_columns);
        }
    }
}

const kt_arithmetic kt_int8_arithmetic = {
    .a_bytes = 1, .h_bytes = 6, .allocate = allocate, .quantize = quantize, .gate_up = gate_up,
    .requantize = requantize, .down = down};
