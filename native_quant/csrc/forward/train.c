/* The forward and backward of a layer's routed experts for training LoRA (numerics.md, section 5c): what is computed,
 * in which steps. A step's slices may be worked off in any order; steps follow one another. Rows are (token, expert)
 * pairs, sorted by expert, as in moe.c; blocks of rows go through the kernels together. */
#include <string.h>

#include "bf16.h"
#include "train.h"

enum { OF_X_BUDGET = 16 << 20, LEAST_SECTION = 128, TOKENS = 16, OUTER = 16 /* panels of a factor's gradient */ };

static const kt_format *bf16(void) {
    return kt_format_of(KTQ_FORMAT_BF16);
}

static int in_int8(const kt_training *t) {
    return t->pass.gate->arithmetic == &kt_int8_arithmetic;
}

/* Whether gradients are multiplied in int8. */
static int quantizes_gradients(const kt_training *t) {
    return t->moe->transposed && in_int8(t);
}

static kt_matrix matrix_in(const kt_training *t, const ktq_expert *table, int64_t bucket, int64_t part,
                           int projection) {
    const ktq_expert *expert = &table[part * t->moe->experts + t->pass.bucket[bucket].expert];
    int64_t width = t->moe->width[part], hidden = t->moe->hidden;
    switch (projection) {
    case KT_PROJECTION_GATE: return (kt_matrix){t->pass.gate, expert->gate, expert->gate_scale, width, hidden};
    case KT_PROJECTION_UP: return (kt_matrix){t->pass.up, expert->up, expert->up_scale, width, hidden};
    }
    return (kt_matrix){t->pass.down, expert->down, expert->down_scale, hidden, width};
}

static kt_matrix matrix_of(const kt_training *t, int64_t bucket, int64_t part, int projection) {
    return matrix_in(t, t->moe->expert, bucket, part, projection);
}

/* --- the slices of a step ----------------------------------------------------------------------------------------- */

static void add(kt_training *t, int group, kt_slice slice) {
    t->slice[t->end[group]++] = slice;
}

static void begin_group(kt_training *t, int group) {
    t->end[group] = group ? t->end[group - 1] : 0;
    t->group[group].next = t->end[group];
}

static void add_range(kt_training *t, int group, int64_t bucket, int64_t part, int64_t count, int64_t step) {
    for (int64_t i = 0; i < count; i += step)
        add(t, group, (kt_slice){bucket, part, i, count - i < step ? count - i : step});
}

static void work(void *argument, int group, int worker) {
    kt_training *t = argument;
    kt_fp_state state = kt_enter_forward();
    for (int g = 0, next; g < t->pass.groups; g++) {
        int at = (group + g) % t->pass.groups;
        while ((next = (int)atomic_fetch_add_explicit(&t->group[at].next, 1, memory_order_relaxed)) < t->end[at])
            t->step(t, &t->slice[next], &t->scratch[worker]);
    }
    kt_leave(state);
}

static void run(ktq_pool *pool, kt_training *t, kt_step *step) {
    t->step = step;
    kt_pool_run(pool, work, t);
}

static void run_blocks(ktq_pool *pool, kt_training *t, kt_step *step) {
    for (int g = 0; g < t->pass.groups; g++) {
        begin_group(t, g);
        for (int64_t b = 0; !g && b < t->pass.buckets; b++) add_range(t, g, b, 0, t->pass.bucket[b].m, KT_TOKEN_BLOCK);
    }
    run(pool, t, step);
}

/* Panels of each part, those of a part by its group first: `panels` of them, or 0: as many as the part has. */
static void run_panels(ktq_pool *pool, kt_training *t, int64_t parts, int64_t panels, kt_step *step) {
    for (int g = 0; g < t->pass.groups; g++) {
        begin_group(t, g);
        for (int64_t part = g; part < parts; part += t->pass.groups)
            for (int64_t b = 0; b < t->pass.buckets; b++)
                add_range(t, g, b, part, panels ? panels : t->moe->width[part] / KT_PANEL_ROWS, KT_TURNED);
    }
    run(pool, t, step);
}

static void run_tokens(ktq_pool *pool, kt_training *t, kt_step *step) {
    for (int g = 0; g < t->pass.groups; g++) {
        begin_group(t, g);
        if (!g) add_range(t, g, 0, 0, t->call->tokens, TOKENS);
    }
    run(pool, t, step);
}

static void run_factors(ktq_pool *pool, kt_training *t) {
    for (int g = 0; g < t->pass.groups; g++) {
        begin_group(t, g);
        for (int64_t b = 0; !g && b < t->pass.buckets; b++)
            for (int64_t i = 0; i < 2 * KT_PROJECTIONS; i++) {
                int of_hidden = (i / 2 == KT_PROJECTION_DOWN) == i % 2;
                add_range(t, g, b, i, (of_hidden ? t->moe->hidden : t->columns) / KT_PANEL_ROWS, OUTER);
            }
    }
    run(pool, t, kt_factor_gradient);
}

static int64_t most_slices(const kt_training *t) {
    int64_t panels = t->columns / KT_PANEL_ROWS + (t->moe->parts + 1) * (t->moe->hidden / KT_PANEL_ROWS + 1);
    return t->call->tokens + t->pass.rows + t->pass.buckets * 2 * KT_PROJECTIONS * (panels + t->moe->parts);
}

/* --- numbers ------------------------------------------------------------------------------------------------------ */

/* BF16 of c[m][32], of that and the scaled product of LoRA (NULL: none): c, and rows of `out` (NULL: not wanted). */
static void finish(const kt_training *t, int64_t m, float *c, float *of_lora, uint16_t *out, int64_t pitch,
                   const kt_train_scratch *s) {
    const float *sums[] = {c, of_lora};
    int64_t count = m * KT_PANEL_ROWS;
    t->kernels->merge(1, sums, count, s->rounded);
    t->kernels->widen_scales(2, (uint8_t *)s->rounded, count, c);
    if (of_lora) {
        t->kernels->combine(2, sums, (float[]){1, t->scaling}, count, c);
        t->kernels->merge(1, sums, count, s->rounded);
        t->kernels->widen_scales(2, (uint8_t *)s->rounded, count, c);
    }
    for (int64_t i = 0; out && i < m; i++)
        memcpy(out + i * pitch, s->rounded + i * KT_PANEL_ROWS, KT_PANEL_ROWS * sizeof *out);
}

/* The row of codes where a block's begin: its last tile may be longer than its rows. */
static int64_t code_row(const kt_training *t, const kt_slice *block) {
    return t->pass.bucket[block->bucket].first + block->first +
           KT_MOST_TILE_ROWS * (t->block[block->bucket] + block->first / KT_TOKEN_BLOCK);
}

static void quantize(const kt_training *t, const kt_slice *block, const uint16_t *rows, int64_t pitch, int64_t k,
                     const kt_codes8 *to) {
    int64_t tile_rows = t->kernels->tiling(t->pass.gate->bits, block->count).rows, first = code_row(t, block), energy;
    for (int64_t i = 0; i < block->count; i++) {
        kt_code_row place = {to->q + first * k + kt_in_tiles(tile_rows, k, i), tile_rows * 64};
        to->scale[first + i] = t->kernels->quantize_row(1, rows + i * pitch, k, 1, &place,
                                                        to->sums + (first + i) * kt_blocks(k, KT_K_BLOCK), &energy);
    }
}

/* A block's rows times some panels of a weight: c[panel][m][32]. codes: the same rows in int8. */
static void multiply(const kt_training *t, const kt_slice *block, const kt_matrix *w, int64_t first, int64_t count,
                     const uint16_t *rows, int64_t pitch, const kt_codes8 *codes, float *c,
                     const kt_train_scratch *s) {
    int64_t m = block->count, c_pitch = (m + KT_MOST_TILE_ROWS) * KT_PANEL_ROWS, row = code_row(t, block);
    int bits = w->format->bits;
    if (!in_int8(t)) {
        kt_multiply_bf16(t->kernels, w->format, w->codes, w->scales, w->k, first, count, rows, pitch, m, c, s->gemm);
        return;
    }
    kt_panel panel[KT_TURNED];
    for (int64_t i = 0; i < count; i++) panel[i] = kt_panel_of(bits, w->codes, w->k, first + i);
    int64_t sums_pitch = kt_blocks(w->k, KT_K_BLOCK);
    int unit = w->format->gemm(t->kernels)(&(kt_gemm){.m = m,
                                                      .k = w->k,
                                                      .a = codes->q + row * w->k,
                                                      .tile_rows = t->kernels->tiling(bits, m).rows,
                                                      .sums = codes->sums + row * sums_pitch,
                                                      .sums_pitch = sums_pitch,
                                                      .panels = count,
                                                      .panel = panel,
                                                      .c = s->acc,
                                                      .c_pitch = c_pitch,
                                                      .scratch = s->gemm});
    for (int64_t i = 0; i < count; i++)
        t->kernels->scale_rows(
            &(kt_outputs){.m = m,
                          .unit = (float)unit,
                          .token_scale = codes->scale + row,
                          .acc = {s->acc + i * c_pitch},
                          .row_scale = {(const float *)w->scales + (first + i) * KT_PANEL_ROWS},
                          .out = c + i * m * KT_PANEL_ROWS,
                          .out_pitch = KT_PANEL_ROWS,
                          .rest = s->zeros});
}

/* Columns from 32 * first on of a weight, as panels of its transpose, where nothing has packed that. */
static void transpose(const kt_training *t, int64_t bucket, int64_t part, int projection, int64_t first, int64_t count,
                      uint16_t *panels, const kt_train_scratch *s) {
    kt_matrix w = matrix_of(t, bucket, part, projection);
    if (!t->moe->transposed) kt_turn(t->kernels, &w, first * KT_PANEL_ROWS, count, panels, s->chunk);
}

/* A block's rows times them, or times those that were packed. */
static void multiply_transposed(const kt_training *t, const kt_slice *block, int64_t part, int projection,
                                int64_t first, int64_t count, const uint16_t *panels, const uint16_t *rows,
                                int64_t pitch, const kt_codes8 *codes, float *c, const kt_train_scratch *s) {
    int64_t k = projection == KT_PROJECTION_DOWN ? t->moe->hidden : t->moe->width[part];
    if (!t->moe->transposed) {
        kt_multiply_bf16(t->kernels, bf16(), panels, NULL, k, 0, count, rows, pitch, block->count, c, s->gemm);
        return;
    }
    kt_matrix w = matrix_in(t, t->moe->transposed, block->bucket, part, projection);
    w.n = w.k;
    w.k = k;
    multiply(t, block, &w, first, count, rows, pitch, codes, c, s);
}

static uint16_t *low_of(const kt_training *t, uint16_t *low, int64_t which, int64_t row) {
    return low + (which * t->pass.rows + row) * 2 * t->low;
}

/* Rows times the factor `a`, after dropout. column: where a part begins in rows. */
static void narrow_inputs(const kt_training *t, int projection, int64_t expert, int64_t column, int64_t k,
                          const uint16_t *rows, int64_t pitch, int64_t row, int64_t m, uint16_t *low,
                          const kt_train_scratch *s) {
    if (t->lora->dropout > 0) {
        for (int64_t i = 0; i < m; i++) {
            memcpy(s->turned + i * k, rows + i * pitch, (size_t)k * sizeof *rows);
            kt_drop(t, projection, row + i, column, k, s->turned + i * k);
        }
        rows = s->turned;
        pitch = k;
    }
    kt_narrow(t, (kt_factor){0, projection}, expert, column, k, rows, pitch, m, low, s);
}

/* --- the forward's steps ------------------------------------------------------------------------------------------ */

static const uint16_t *row_of_token(const kt_training *t, const uint16_t *rows, int64_t row) {
    return rows + t->pair_of[row] / t->call->topk * t->moe->hidden;
}

static void gather(const kt_training *t, const kt_slice *block, const kt_train_scratch *s) {
    const kt_bucket *bucket = &t->pass.bucket[block->bucket];
    int64_t row = bucket->first + block->first, hidden = t->moe->hidden;
    uint16_t *x = t->x + row * hidden;
    for (int64_t i = 0; i < block->count; i++)
        memcpy(x + i * hidden, row_of_token(t, t->call->hidden, row + i), (size_t)hidden * sizeof *x);
    if (in_int8(t)) quantize(t, block, x, hidden, hidden, &t->x8);
    for (int i = KT_PROJECTION_GATE; t->lora && i <= KT_PROJECTION_UP; i++)
        narrow_inputs(t, i, bucket->expert, 0, hidden, x, hidden, row, block->count, low_of(t, t->kept->low, i, row),
                      s);
}

static void gate_up(const kt_training *t, const kt_slice *slice, const kt_train_scratch *s) {
    const kt_bucket *bucket = &t->pass.bucket[slice->bucket];
    uint16_t *const out[] = {t->kept->gate, t->kept->up};
    for (int64_t first = 0; first < bucket->m; first += KT_TOKEN_BLOCK) {
        int64_t m = bucket->m - first < KT_TOKEN_BLOCK ? bucket->m - first : KT_TOKEN_BLOCK;
        int64_t row = bucket->first + first;
        const kt_slice block = {slice->bucket, 0, first, m};
        int64_t at = row * t->columns + t->offset[slice->part] + slice->first * KT_PANEL_ROWS;
        for (int i = KT_PROJECTION_GATE; i <= KT_PROJECTION_UP; i++) {
            kt_matrix w = matrix_of(t, slice->bucket, slice->part, i);
            multiply(t, &block, &w, slice->first, slice->count, t->x + row * w.k, w.k, &t->x8,
                     s->c + i * KT_TURNED * m * KT_PANEL_ROWS, s);
        }
        for (int64_t p = 0; p < slice->count; p++, at += KT_PANEL_ROWS) {
            float *c[2] = {s->c + p * m * KT_PANEL_ROWS, s->c + (KT_TURNED + p) * m * KT_PANEL_ROWS};
            for (int i = KT_PROJECTION_GATE; i <= KT_PROJECTION_UP; i++) {
                if (t->lora)
                    kt_widen(t, (kt_factor){1, i}, bucket->expert, at % t->columns, low_of(t, t->kept->low, i, row), m,
                             s->of_lora, s);
                finish(t, m, c[i], t->lora ? s->of_lora : NULL, out[i] + at, t->columns, s);
            }
            t->kernels->swiglu_bf16(m, c[0], c[1], t->kept->act + at, NULL, t->columns);
        }
    }
}

static void between(const kt_training *t, const kt_slice *block, const kt_train_scratch *s) {
    const kt_bucket *bucket = &t->pass.bucket[block->bucket];
    int64_t row = bucket->first + block->first;
    for (int64_t part = 0; part < t->moe->parts; part++) {
        int64_t width = t->moe->width[part], offset = t->offset[part];
        const uint16_t *act = t->kept->act + row * t->columns + offset;
        if (in_int8(t)) quantize(t, block, act, t->columns, width, &t->act8[part]);
        if (t->lora)
            narrow_inputs(t, KT_PROJECTION_DOWN, bucket->expert, offset, width, act, t->columns, row, block->count,
                          low_of(t, t->kept->low, KT_PROJECTION_DOWN + part, row), s);
    }
}

static void down(const kt_training *t, const kt_slice *slice, const kt_train_scratch *s) {
    const kt_bucket *bucket = &t->pass.bucket[slice->bucket];
    const kt_matrix w = matrix_of(t, slice->bucket, slice->part, KT_PROJECTION_DOWN);
    for (int64_t first = 0; first < bucket->m; first += KT_TOKEN_BLOCK) {
        int64_t m = bucket->m - first < KT_TOKEN_BLOCK ? bucket->m - first : KT_TOKEN_BLOCK;
        int64_t row = bucket->first + first;
        const kt_slice block = {slice->bucket, 0, first, m};
        multiply(t, &block, &w, slice->first, slice->count, t->kept->act + row * t->columns + t->offset[slice->part],
                 t->columns, &t->act8[slice->part], s->c, s);
        for (int64_t p = 0; p < slice->count; p++) {
            int64_t column = (slice->first + p) * KT_PANEL_ROWS;
            if (t->lora)
                kt_widen(t, (kt_factor){1, KT_PROJECTION_DOWN}, bucket->expert, column,
                         low_of(t, t->kept->low, KT_PROJECTION_DOWN + slice->part, row), m, s->of_lora, s);
            finish(t, m, s->c + p * m * KT_PANEL_ROWS, t->lora ? s->of_lora : NULL,
                   t->kept->down + (slice->part * t->pass.rows + row) * w.n + column, w.n, s);
        }
    }
}

static void combine(const kt_training *t, const kt_slice *slice, const kt_train_scratch *s) {
    int64_t topk = t->call->topk, hidden = t->moe->hidden;
    const float *terms[] = {s->products, s->of_lora};
    for (int64_t token = slice->first; token < slice->first + slice->count; token++) {
        memset(s->products, 0, (size_t)hidden * sizeof(float));
        for (int64_t part = 0; part < t->moe->parts; part++)
            for (int64_t i = token * topk; i < (token + 1) * topk; i++) {
                if (t->pass.pair[i].row < 0) continue;
                const uint16_t *row = t->kept->down + (part * t->pass.rows + t->pass.pair[i].row) * hidden;
                t->kernels->widen_scales(2, (const uint8_t *)row, hidden, s->of_lora);
                t->kernels->combine(2, terms, (float[]){1, t->call->weights[i]}, hidden, s->products);
            }
        t->kernels->merge(1, terms, hidden, t->call->out + token * hidden);
    }
}

/* --- the backward's steps ----------------------------------------------------------------------------------------- */

/* The sum of products, in 8 sums. count: a multiple of 8. */
static float dot(const uint16_t *x, const uint16_t *y, int64_t count) {
    float sum[8] = {0};
    for (int64_t i = 0; i < count; i += 8)
        for (int j = 0; j < 8; j++) sum[j] += kt_from_bf16(x[i + j]) * kt_from_bf16(y[i + j]);
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

/* Rows of the output's gradient times their weights, and the weights' gradients. */
static void weigh(const kt_training *t, const kt_slice *block, const kt_train_scratch *s) {
    const kt_bucket *bucket = &t->pass.bucket[block->bucket];
    int64_t first = bucket->first + block->first, hidden = t->moe->hidden;
    const float *terms[] = {s->products};
    for (int64_t row = first; row < first + block->count; row++) {
        const uint16_t *given = row_of_token(t, t->gradients->out, row);
        t->kernels->widen_scales(2, (const uint8_t *)given, hidden, s->products);
        t->kernels->combine(1, terms, &t->call->weights[t->pair_of[row]], hidden, s->products);
        t->kernels->merge(1, terms, hidden, t->gradient + row * hidden);
        float sum = 0;
        for (int64_t part = 0; part < t->moe->parts; part++)
            sum += dot(given, t->kept->down + (part * t->pass.rows + row) * hidden, hidden);
        t->gradients->weights[t->pair_of[row]] = sum;
        if (t->lora)
            memcpy(t->x + row * hidden, row_of_token(t, t->call->hidden, row), (size_t)hidden * sizeof *t->x);
    }
    if (quantizes_gradients(t)) quantize(t, block, t->gradient + first * hidden, hidden, hidden, &t->x8);
    if (t->lora)
        kt_narrow(t, (kt_factor){1, KT_PROJECTION_DOWN}, bucket->expert, 0, hidden, t->gradient + first * hidden,
                  hidden, block->count, low_of(t, t->of_low[KT_PROJECTION_DOWN], 0, first), s);
}

/* The gradients of down's inputs, gate and up. */
static void through_down(const kt_training *t, const kt_slice *slice, const kt_train_scratch *s) {
    const kt_bucket *bucket = &t->pass.bucket[slice->bucket];
    int64_t hidden = t->moe->hidden;
    transpose(t, slice->bucket, slice->part, KT_PROJECTION_DOWN, slice->first, slice->count, s->turned, s);
    for (int64_t first = 0; first < bucket->m; first += KT_TOKEN_BLOCK) {
        int64_t m = bucket->m - first < KT_TOKEN_BLOCK ? bucket->m - first : KT_TOKEN_BLOCK;
        int64_t row = bucket->first + first;
        const kt_slice block = {slice->bucket, 0, first, m};
        multiply_transposed(t, &block, slice->part, KT_PROJECTION_DOWN, slice->first, slice->count, s->turned,
                            t->gradient + row * hidden, hidden, &t->x8, s->c, s);
        for (int64_t p = 0; p < slice->count; p++) {
            int64_t column = t->offset[slice->part] + (slice->first + p) * KT_PANEL_ROWS;
            int64_t at = row * t->columns + column;
            float *c = s->c + p * m * KT_PANEL_ROWS;
            if (t->lora)
                kt_widen(t, (kt_factor){0, KT_PROJECTION_DOWN}, bucket->expert, column,
                         low_of(t, t->of_low[KT_PROJECTION_DOWN], 0, row), m, s->of_lora, s);
            for (int64_t i = 0; t->lora && t->lora->dropout > 0 && i < m; i++)
                kt_drop_floats(t, KT_PROJECTION_DOWN, row + i, column, KT_PANEL_ROWS, s->of_lora + i * KT_PANEL_ROWS);
            finish(t, m, c, t->lora ? s->of_lora : NULL, NULL, 0, s);
            t->kernels->swiglu_backward(m, c, t->kept->gate + at, t->kept->up + at, t->of_gate + at, t->of_up + at,
                                        t->columns);
        }
    }
}

static void between_gradients(const kt_training *t, const kt_slice *block, const kt_train_scratch *s) {
    const kt_bucket *bucket = &t->pass.bucket[block->bucket];
    int64_t row = bucket->first + block->first;
    for (int i = KT_PROJECTION_GATE; i <= KT_PROJECTION_UP; i++) {
        const uint16_t *rows = (i ? t->of_up : t->of_gate) + row * t->columns;
        for (int64_t part = 0; quantizes_gradients(t) && part < t->moe->parts; part++)
            quantize(t, block, rows + t->offset[part], t->columns, t->moe->width[part], &(i ? t->up8 : t->act8)[part]);
        if (t->lora)
            kt_narrow(t, (kt_factor){1, i}, bucket->expert, 0, t->columns, rows, t->columns, block->count,
                      low_of(t, t->of_low[i], 0, row), s);
    }
}

/* A section of the gradients of gate's and up's inputs, for each row. */
static void through_gate_up(const kt_training *t, const kt_slice *slice, const kt_train_scratch *s) {
    const kt_bucket *bucket = &t->pass.bucket[slice->bucket];
    int64_t panel = t->section * t->section_columns / KT_PANEL_ROWS + slice->first, column = panel * KT_PANEL_ROWS;
    for (int64_t part = 0; part < t->moe->parts; part++) {
        int64_t width = t->moe->width[part];
        uint16_t *turned[] = {s->turned, s->turned + KT_TURNED * KT_PANEL_ROWS * width};
        for (int i = KT_PROJECTION_GATE; i <= KT_PROJECTION_UP; i++)
            transpose(t, slice->bucket, part, i, panel, slice->count, turned[i], s);
        for (int64_t first = 0; first < bucket->m; first += KT_TOKEN_BLOCK) {
            int64_t m = bucket->m - first < KT_TOKEN_BLOCK ? bucket->m - first : KT_TOKEN_BLOCK;
            int64_t row = bucket->first + first, at = row * t->columns + t->offset[part];
            const kt_slice block = {slice->bucket, 0, first, m};
            float *c[] = {s->c, s->c + KT_TURNED * m * KT_PANEL_ROWS};
            for (int i = KT_PROJECTION_GATE; i <= KT_PROJECTION_UP; i++)
                multiply_transposed(t, &block, part, i, panel, slice->count, turned[i],
                                    (i ? t->of_up : t->of_gate) + at, t->columns, &(i ? t->up8 : t->act8)[part], c[i],
                                    s);
            for (int64_t p = 0; p < slice->count; p++, c[0] += m * KT_PANEL_ROWS, c[1] += m * KT_PANEL_ROWS) {
                const float *sums[] = {c[0], c[1], s->of_lora, s->products};
                const float weights[] = {1, 1, t->scaling, 1};
                float *out = t->of_x + row * t->section_columns + (slice->first + p) * KT_PANEL_ROWS;
                t->kernels->combine(2, sums, weights, m * KT_PANEL_ROWS, c[0]);
                sums[1] = s->of_lora;
                for (int i = KT_PROJECTION_GATE; t->lora && !part && i <= KT_PROJECTION_UP; i++) {
                    kt_widen(t, (kt_factor){0, i}, bucket->expert, column + p * KT_PANEL_ROWS,
                             low_of(t, t->of_low[i], 0, row), m, s->of_lora, s);
                    for (int64_t j = 0; t->lora->dropout > 0 && j < m; j++)
                        kt_drop_floats(t, i, row + j, column + p * KT_PANEL_ROWS, KT_PANEL_ROWS,
                                       s->of_lora + j * KT_PANEL_ROWS);
                    t->kernels->combine(2, sums, weights + 1, m * KT_PANEL_ROWS, c[0]);
                }
                for (int64_t j = 0; j < m; j++, out += t->section_columns) {
                    const float *both[] = {out, c[0] + j * KT_PANEL_ROWS};
                    if (part) t->kernels->combine(2, both, (float[]){1, 1}, KT_PANEL_ROWS, out);
                    else memcpy(out, both[1], KT_PANEL_ROWS * sizeof *out);
                }
            }
        }
    }
}

/* The gradient of a token's hidden state: the sum over its experts, in the router's order. */
static void sum_tokens(const kt_training *t, const kt_slice *slice, const kt_train_scratch *s) {
    int64_t topk = t->call->topk, hidden = t->moe->hidden, column = t->section * t->section_columns;
    int64_t columns = hidden - column < t->section_columns ? hidden - column : t->section_columns;
    for (int64_t token = slice->first; token < slice->first + slice->count; token++) {
        memset(s->products, 0, (size_t)columns * sizeof(float));
        for (int64_t i = token * topk; i < (token + 1) * topk; i++) {
            if (t->pass.pair[i].row < 0) continue;
            const float *terms[] = {s->products, t->of_x + t->pass.pair[i].row * t->section_columns};
            t->kernels->combine(2, terms, (float[]){1, 1}, columns, s->products);
        }
        t->kernels->merge(1, (const float *const[]){s->products}, columns,
                          t->gradients->hidden + token * hidden + column);
    }
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

static int64_t *allocate_sorting(kt_training *t, kt_arena *arena) {
    int64_t *place;
    KT_TAKE(place, t->moe->experts);
    KT_TAKE(t->pass.bucket, t->moe->experts);
    KT_TAKE(t->pass.pair, t->call->tokens * t->call->topk);
    return place;
}

static void allocate_codes(const kt_training *t, kt_codes8 *codes, int64_t k, kt_arena *arena) {
    int64_t rows = t->pass.rows + KT_MOST_TILE_ROWS * (t->pass.buckets + t->pass.rows / KT_TOKEN_BLOCK);
    KT_TAKE(codes->q, rows * k);
    KT_TAKE(codes->scale, rows);
    KT_TAKE(codes->sums, rows * kt_blocks(k, KT_K_BLOCK));
}

static int64_t larger(int64_t x, int64_t y) {
    return x > y ? x : y;
}

static void allocate_scratch(const kt_training *t, kt_train_scratch *s, kt_arena *arena) {
    int64_t longest = larger(t->moe->hidden, t->columns), padded = kt_blocks(t->largest, KT_PANEL_ROWS) * KT_PANEL_ROWS;
    int64_t rank = t->lora ? kt_blocks(t->lora->rank, KT_PANEL_ROWS) * KT_PANEL_ROWS : 0;
    int64_t lows = 2 * rank * t->moe->parts, panels = larger(2 * KT_TURNED, rank / KT_PANEL_ROWS);
    int64_t block = KT_TOKEN_BLOCK * KT_PANEL_ROWS, c = larger(panels * block, lows * KT_PANEL_ROWS);
    int64_t turned = KT_TURNED * KT_PANEL_ROWS * larger(t->moe->hidden, 2 * t->width);
    if (t->lora) {
        int64_t rows = larger(larger(KT_PANEL_ROWS, rank) * longest, KT_PANEL_ROWS * (padded + 1));
        KT_TAKE(s->rows, rows);
        KT_TAKE(s->panels, larger(rows, KT_PANEL_ROWS * 2 * rank));
        KT_TAKE(s->low, lows * padded);
        if (t->lora->dropout > 0) turned = larger(turned, KT_TOKEN_BLOCK * longest);
    }
    KT_TAKE(s->turned, turned);
    KT_TAKE(s->chunk, 2 * KT_TURNED * KT_PANEL_ROWS * KT_PANEL_ROWS);
    KT_TAKE(s->rounded, larger(block, 2 * rank * KT_PANEL_ROWS)); /* or as many floats of a factor's gradient */
    KT_TAKE(s->c, c);
    KT_TAKE(s->of_lora, larger(block, t->moe->hidden));
    KT_TAKE(s->products, t->moe->hidden);
    KT_TAKE(s->acc, KT_TURNED * (KT_TOKEN_BLOCK + KT_MOST_TILE_ROWS) * KT_PANEL_ROWS);
    KT_TAKE(s->zeros, KT_TOKEN_BLOCK);
    KT_TAKE(s->gemm, KT_GEMM_SCRATCH);
    if (arena->base) memset(s->zeros, 0, KT_TOKEN_BLOCK * sizeof *s->zeros);
}

static void allocate(kt_training *t, int workers, kt_arena *arena) {
    int64_t rows = t->pass.rows, hidden = t->moe->hidden;
    allocate_sorting(t, arena);
    KT_TAKE(t->slice, most_slices(t));
    KT_TAKE(t->pair_of, rows);
    KT_TAKE(t->block, t->pass.buckets);
    KT_TAKE(t->scratch, workers);
    for (int i = 0; i < workers; i++) {
        kt_train_scratch none;
        allocate_scratch(t, arena->base ? &t->scratch[i] : &none, arena);
    }
    KT_TAKE(t->x, rows * hidden);
    if (t->gradients ? quantizes_gradients(t) : in_int8(t)) {
        allocate_codes(t, &t->x8, hidden, arena);
        for (int64_t part = 0; part < t->moe->parts; part++) {
            allocate_codes(t, &t->act8[part], t->moe->width[part], arena);
            if (t->gradients) allocate_codes(t, &t->up8[part], t->moe->width[part], arena);
        }
    }
    if (!t->gradients) return;
    KT_TAKE(t->gradient, rows * hidden);
    KT_TAKE(t->of_gate, rows * t->columns);
    KT_TAKE(t->of_up, rows * t->columns);
    KT_TAKE(t->of_x, rows * t->section_columns);
    for (int i = 0; t->lora && i < KT_PROJECTIONS; i++) KT_TAKE(t->of_low[i], rows * 2 * t->low);
}

static int sort_and_allocate(ktq_pool *pool, kt_training *t) {
    int workers = kt_pool_workers(pool);
    kt_arena counted = {0};
    allocate_sorting(t, &counted);
    kt_arena first = {.base = kt_pool_block(pool, counted.used, 0)};
    if (!first.base) return KTQ_ENOMEM;
    kt_sort_tokens(&t->pass, allocate_sorting(t, &first));
    kt_open_gaps(&first);
    t->largest = t->pass.buckets ? t->pass.bucket[0].m : 0;
    int64_t columns = OF_X_BUDGET / (int64_t)sizeof(float) / larger(t->pass.rows, 1) / LEAST_SECTION * LEAST_SECTION;
    t->section_columns = columns < LEAST_SECTION ? LEAST_SECTION : columns;
    if (t->section_columns > t->moe->hidden) t->section_columns = t->moe->hidden;

    counted = (kt_arena){0};
    kt_training copy = *t;
    allocate(&copy, workers, &counted);
    kt_arena whole = {.base = kt_pool_block(pool, counted.used, first.used)}; /* begins with the sorted tokens */
    if (!whole.base) return KTQ_ENOMEM;
    allocate(t, workers, &whole);
    for (int64_t i = 0; i < t->call->tokens * t->call->topk; i++)
        if (t->pass.pair[i].row >= 0) t->pair_of[t->pass.pair[i].row] = i;
    for (int64_t b = 0, blocks = 0; b < t->pass.buckets; b++) {
        t->block[b] = blocks;
        blocks += kt_blocks(t->pass.bucket[b].m, KT_TOKEN_BLOCK);
    }
    kt_open_gaps(&whole);
    return KTQ_OK;
}

/* --- the two functions -------------------------------------------------------------------------------------------- */

int ktq_trainable(const ktq_moe *moe) {
    const int formats[] = {moe->gate_format, moe->up_format, moe->down_format};
    for (int i = 0; i < KT_PROJECTIONS; i++)
        if (kt_format_of(formats[i])->least || kt_format_of(formats[i])->two_terms) return 0;
    return !moe->swiglu_limit && !moe->swiglu_alpha;
}

static int check(const kt_training *t) {
    const ktq_kept *kept = t->kept;
    if (!kept || !ktq_trainable(t->moe)) return KTQ_EINVAL;
    for (int64_t part = 0; t->moe->transposed && part < t->moe->parts; part++) {
        int64_t width = t->moe->width[part], hidden = t->moe->hidden;
        int error = kt_check_size(kt_format_of(t->moe->gate_format), hidden, width);
        if (!error) error = kt_check_size(kt_format_of(t->moe->up_format), hidden, width);
        if (!error) error = kt_check_size(kt_format_of(t->moe->down_format), width, hidden);
        if (error) return error;
    }
    if (t->call->tokens && (!kept->gate || !kept->up || !kept->act || !kept->down)) return KTQ_EINVAL;
    if (!t->lora) return KTQ_OK;
    if (t->lora->rank < 1 || t->lora->rank > KTQ_MOST_RANK) return KTQ_EINVAL;
    if (!(t->lora->dropout >= 0 && t->lora->dropout < 1) || (t->call->tokens && !kept->low)) return KTQ_EINVAL;
    for (int i = 0; i < KT_PROJECTIONS; i++) {
        if (!t->lora->a[i] || !t->lora->b[i]) return KTQ_EINVAL;
        if (t->gradients && (!t->gradients->a[i] || !t->gradients->b[i])) return KTQ_EINVAL;
    }
    return KTQ_OK;
}

/* Between this and kt_pool_leave: all is checked, sorted and allocated. */
static int begin(ktq_pool *pool, kt_training *t) {
    int error = pool ? kt_check_call(t->moe, t->call) : KTQ_EINVAL;
    if (!error) error = check(t);
    if (!error) error = kt_pool_enter(pool);
    if (error) return error;
    const ktq_moe *moe = t->moe;
    int groups = kt_pool_groups(pool) < moe->parts ? kt_pool_groups(pool) : (int)moe->parts;
    t->pass = (kt_pass){.moe = moe,
                        .gate = kt_format_of(moe->gate_format),
                        .up = kt_format_of(moe->up_format),
                        .down = kt_format_of(moe->down_format),
                        .call = t->call,
                        .tokens = t->call->tokens,
                        .groups = groups};
    t->kernels = kt_current();
    t->width = kt_widest_part(moe);
    for (int64_t part = 0; part < moe->parts; part++) {
        t->offset[part] = t->columns;
        t->columns += moe->width[part];
    }
    if (t->lora) {
        t->low = ktq_low_columns(t->lora->rank);
        t->scaling = t->lora->scaling / (1 - t->lora->dropout);
    }
    error = sort_and_allocate(pool, t);
    if (error) kt_pool_leave(pool);
    return error;
}

int ktq_train_forward(ktq_pool *pool, const ktq_moe *moe, const ktq_call *call, const ktq_lora *lora,
                      const ktq_kept *kept) {
    kt_training t = {.moe = moe, .call = call, .lora = lora, .kept = kept};
    int error = begin(pool, &t);
    if (error) return error;
    run_blocks(pool, &t, gather);
    run_panels(pool, &t, moe->parts, 0, gate_up);
    if (lora || in_int8(&t)) run_blocks(pool, &t, between);
    run_panels(pool, &t, moe->parts, moe->hidden / KT_PANEL_ROWS, down);
    run_tokens(pool, &t, combine);
    kt_pool_leave(pool);
    return KTQ_OK;
}

int ktq_train_backward(ktq_pool *pool, const ktq_moe *moe, const ktq_call *call, const ktq_lora *lora,
                       const ktq_kept *kept, const ktq_gradients *gradients) {
    if (!gradients || (call && call->tokens && (!gradients->out || !gradients->hidden || !gradients->weights)))
        return KTQ_EINVAL;
    kt_training t = {.moe = moe, .call = call, .lora = lora, .kept = kept, .gradients = gradients};
    int error = begin(pool, &t);
    if (error) return error;
    if (call->tokens) memset(gradients->weights, 0, (size_t)(call->tokens * call->topk) * sizeof *gradients->weights);
    run_blocks(pool, &t, weigh);
    run_panels(pool, &t, moe->parts, 0, through_down);
    if (lora || quantizes_gradients(&t)) run_blocks(pool, &t, between_gradients);
    for (; t.section * t.section_columns < moe->hidden; t.section++) {
        int64_t left = moe->hidden - t.section * t.section_columns;
        int64_t columns = left < t.section_columns ? left : t.section_columns;
        run_panels(pool, &t, 1, columns / KT_PANEL_ROWS, through_gate_up);
        run_tokens(pool, &t, sum_tokens);
    }
    if (lora) run_factors(pool, &t);
    kt_pool_leave(pool);
    return KTQ_OK;
}
