/* The forward and backward of a layer's routed experts for training LoRA (numerics.md, section 5c): what is computed,
 * in which steps. A step's slices may be worked off in any order; steps follow one another. Rows are (token, expert)
 * pairs, sorted by expert, as in moe.c; blocks of rows go through the kernels together. */
#include <string.h>

#include "bf16.h"
#include "train.h"

/* --- the forward's steps ------------------------------------------------------------------------------------------ */

static const uint16_t *row_of_token(const kt_training *t, const uint16_t *rows, int64_t row) {
    return rows + t->pair_of[row] / t->call->topk * t->moe->hidden;
}

static void gather_inputs(const kt_training *t, const kt_slice *block, const kt_train_scratch *s) {
    const kt_bucket *bucket = &t->pass.bucket[block->bucket];
    int64_t row = bucket->first + block->first, hidden = t->moe->hidden;
    uint16_t *x = t->x + row * hidden;
    for (int64_t i = 0; i < block->count; i++)
        memcpy(x + i * hidden, row_of_token(t, t->call->hidden, row + i), (size_t)hidden * sizeof *x);
    if (kt_in_int8(t)) kt_quantize_block(t, block, x, hidden, hidden, &t->x8);
    for (int i = KT_PROJECTION_GATE; t->lora && i <= KT_PROJECTION_UP; i++)
        kt_narrow_inputs(t, i, bucket->expert, 0, hidden, x, hidden, row, block->count,
                         kt_low_of(t, t->kept->low, i, row), s);
}

static void compute_gate_up(const kt_training *t, const kt_slice *slice, const kt_train_scratch *s) {
    const kt_bucket *bucket = &t->pass.bucket[slice->bucket];
    uint16_t *const out[] = {t->kept->gate, t->kept->up};
    for (int64_t first = 0; first < bucket->m; first += KT_TOKEN_BLOCK) {
        int64_t m = bucket->m - first < KT_TOKEN_BLOCK ? bucket->m - first : KT_TOKEN_BLOCK;
        int64_t row = bucket->first + first;
        const kt_slice block = {slice->bucket, 0, first, m};
        int64_t at = row * t->columns + t->offset[slice->part] + slice->first * KT_PANEL_ROWS;
        for (int i = KT_PROJECTION_GATE; i <= KT_PROJECTION_UP; i++) {
            kt_matrix w = kt_matrix_of(t, slice->bucket, slice->part, i);
            kt_multiply_block(t, &block, &w, slice->first, slice->count, t->x + row * w.k, w.k, &t->x8,
                              s->c + i * KT_TURNED * m * KT_PANEL_ROWS, s);
        }
        for (int64_t p = 0; p < slice->count; p++, at += KT_PANEL_ROWS) {
            float *c[2] = {s->c + p * m * KT_PANEL_ROWS, s->c + (KT_TURNED + p) * m * KT_PANEL_ROWS};
            for (int i = KT_PROJECTION_GATE; i <= KT_PROJECTION_UP; i++) {
                if (t->lora)
                    kt_widen(t, (kt_factor){1, i}, bucket->expert, at % t->columns,
                             kt_low_of(t, t->kept->low, i, row), m, s->of_lora, s);
                kt_finish(t, m, c[i], t->lora ? s->of_lora : NULL, out[i] + at, t->columns, s);
            }
            t->kernels->swiglu_bf16(m, c[0], c[1], t->kept->act + at, NULL, t->columns);
        }
    }
}

static void prepare_down(const kt_training *t, const kt_slice *block, const kt_train_scratch *s) {
    const kt_bucket *bucket = &t->pass.bucket[block->bucket];
    int64_t row = bucket->first + block->first;
    for (int64_t part = 0; part < t->moe->parts; part++) {
        int64_t width = t->moe->width[part], offset = t->offset[part];
        const uint16_t *act = t->kept->act + row * t->columns + offset;
        if (kt_in_int8(t)) kt_quantize_block(t, block, act, t->columns, width, &t->act8[part]);
        if (t->lora)
            kt_narrow_inputs(t, KT_PROJECTION_DOWN, bucket->expert, offset, width, act, t->columns, row, block->count,
                             kt_low_of(t, t->kept->low, KT_PROJECTION_DOWN + part, row), s);
    }
}

static void compute_down(const kt_training *t, const kt_slice *slice, const kt_train_scratch *s) {
    const kt_bucket *bucket = &t->pass.bucket[slice->bucket];
    const kt_matrix w = kt_matrix_of(t, slice->bucket, slice->part, KT_PROJECTION_DOWN);
    for (int64_t first = 0; first < bucket->m; first += KT_TOKEN_BLOCK) {
        int64_t m = bucket->m - first < KT_TOKEN_BLOCK ? bucket->m - first : KT_TOKEN_BLOCK;
        int64_t row = bucket->first + first;
        const kt_slice block = {slice->bucket, 0, first, m};
        kt_multiply_block(t, &block, &w, slice->first, slice->count,
                          t->kept->act + row * t->columns + t->offset[slice->part], t->columns, &t->act8[slice->part],
                          s->c, s);
        for (int64_t p = 0; p < slice->count; p++) {
            int64_t column = (slice->first + p) * KT_PANEL_ROWS;
            if (t->lora)
                kt_widen(t, (kt_factor){1, KT_PROJECTION_DOWN}, bucket->expert, column,
                         kt_low_of(t, t->kept->low, KT_PROJECTION_DOWN + slice->part, row), m, s->of_lora, s);
            kt_finish(t, m, s->c + p * m * KT_PANEL_ROWS, t->lora ? s->of_lora : NULL,
                      t->kept->down + (slice->part * t->pass.rows + row) * w.n + column, w.n, s);
        }
    }
}

static void combine_experts(const kt_training *t, const kt_slice *slice, const kt_train_scratch *s) {
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
static void weight_gradients(const kt_training *t, const kt_slice *block, const kt_train_scratch *s) {
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
    if (kt_quantizes_gradients(t)) kt_quantize_block(t, block, t->gradient + first * hidden, hidden, hidden, &t->x8);
    if (t->lora)
        kt_narrow(t, (kt_factor){1, KT_PROJECTION_DOWN}, bucket->expert, 0, hidden, t->gradient + first * hidden,
                  hidden, block->count, kt_low_of(t, t->of_low[KT_PROJECTION_DOWN], 0, first), s);
}

/* The gradients of down's inputs, gate and up. */
static void backpropagate_down(const kt_training *t, const kt_slice *slice, const kt_train_scratch *s) {
    const kt_bucket *bucket = &t->pass.bucket[slice->bucket];
    int64_t hidden = t->moe->hidden;
    kt_turn_columns(t, slice->bucket, slice->part, KT_PROJECTION_DOWN, slice->first, slice->count, s->turned, s);
    for (int64_t first = 0; first < bucket->m; first += KT_TOKEN_BLOCK) {
        int64_t m = bucket->m - first < KT_TOKEN_BLOCK ? bucket->m - first : KT_TOKEN_BLOCK;
        int64_t row = bucket->first + first;
        const kt_slice block = {slice->bucket, 0, first, m};
        kt_multiply_turned(t, &block, slice->part, KT_PROJECTION_DOWN, slice->first, slice->count, s->turned,
                           t->gradient + row * hidden, hidden, &t->x8, s->c, s);
        for (int64_t p = 0; p < slice->count; p++) {
            int64_t column = t->offset[slice->part] + (slice->first + p) * KT_PANEL_ROWS;
            int64_t at = row * t->columns + column;
            float *c = s->c + p * m * KT_PANEL_ROWS;
            if (t->lora)
                kt_widen(t, (kt_factor){0, KT_PROJECTION_DOWN}, bucket->expert, column,
                         kt_low_of(t, t->of_low[KT_PROJECTION_DOWN], 0, row), m, s->of_lora, s);
            for (int64_t i = 0; t->lora && t->lora->dropout > 0 && i < m; i++)
                kt_drop_floats(t, KT_PROJECTION_DOWN, row + i, column, KT_PANEL_ROWS, s->of_lora + i * KT_PANEL_ROWS);
            kt_finish(t, m, c, t->lora ? s->of_lora : NULL, NULL, 0, s);
            t->kernels->swiglu_backward(m, c, t->kept->gate + at, t->kept->up + at, t->of_gate + at, t->of_up + at,
                                        t->columns);
        }
    }
}

static void prepare_gradients(const kt_training *t, const kt_slice *block, const kt_train_scratch *s) {
    const kt_bucket *bucket = &t->pass.bucket[block->bucket];
    int64_t row = bucket->first + block->first;
    for (int i = KT_PROJECTION_GATE; i <= KT_PROJECTION_UP; i++) {
        const uint16_t *rows = (i ? t->of_up : t->of_gate) + row * t->columns;
        for (int64_t part = 0; kt_quantizes_gradients(t) && part < t->moe->parts; part++)
            kt_quantize_block(t, block, rows + t->offset[part], t->columns, t->moe->width[part],
                              &(i ? t->up8 : t->act8)[part]);
        if (t->lora)
            kt_narrow(t, (kt_factor){1, i}, bucket->expert, 0, t->columns, rows, t->columns, block->count,
                      kt_low_of(t, t->of_low[i], 0, row), s);
    }
}

/* A section of the gradients of gate's and up's inputs, for each row. */
static void backpropagate_gate_up(const kt_training *t, const kt_slice *slice, const kt_train_scratch *s) {
    const kt_bucket *bucket = &t->pass.bucket[slice->bucket];
    int64_t panel = t->section * t->section_columns / KT_PANEL_ROWS + slice->first, column = panel * KT_PANEL_ROWS;
    for (int64_t part = 0; part < t->moe->parts; part++) {
        int64_t width = t->moe->width[part];
        uint16_t *turned[] = {s->turned, s->turned + KT_TURNED * KT_PANEL_ROWS * width};
        for (int i = KT_PROJECTION_GATE; i <= KT_PROJECTION_UP; i++)
            kt_turn_columns(t, slice->bucket, part, i, panel, slice->count, turned[i], s);
        for (int64_t first = 0; first < bucket->m; first += KT_TOKEN_BLOCK) {
            int64_t m = bucket->m - first < KT_TOKEN_BLOCK ? bucket->m - first : KT_TOKEN_BLOCK;
            int64_t row = bucket->first + first, at = row * t->columns + t->offset[part];
            const kt_slice block = {slice->bucket, 0, first, m};
            float *c[] = {s->c, s->c + KT_TURNED * m * KT_PANEL_ROWS};
            for (int i = KT_PROJECTION_GATE; i <= KT_PROJECTION_UP; i++)
                kt_multiply_turned(t, &block, part, i, panel, slice->count, turned[i],
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
                             kt_low_of(t, t->of_low[i], 0, row), m, s->of_lora, s);
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

/* --- the two functions -------------------------------------------------------------------------------------------- */

int ktq_trainable(const ktq_moe *moe) {
    const int formats[] = {moe->gate_format, moe->up_format, moe->down_format};
    for (int i = 0; i < KT_PROJECTIONS; i++)
        if (kt_format_of(formats[i])->least || kt_format_of(formats[i])->two_terms) return 0;
    return !moe->swiglu_limit && !moe->swiglu_alpha;
}

static int check_training(const kt_training *t) {
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
static int begin_training(ktq_pool *pool, kt_training *t) {
    int error = pool ? kt_check_call(t->moe, t->call) : KTQ_EINVAL;
    if (!error) error = check_training(t);
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
    error = kt_sort_and_allocate(pool, t);
    if (error) kt_pool_leave(pool);
    return error;
}

int ktq_train_forward(ktq_pool *pool, const ktq_moe *moe, const ktq_call *call, const ktq_lora *lora,
                      const ktq_kept *kept) {
    kt_training t = {.moe = moe, .call = call, .lora = lora, .kept = kept};
    int error = begin_training(pool, &t);
    if (error) return error;
    kt_run_blocks(pool, &t, gather_inputs);
    kt_run_panels(pool, &t, moe->parts, 0, compute_gate_up);
    if (lora || kt_in_int8(&t)) kt_run_blocks(pool, &t, prepare_down);
    kt_run_panels(pool, &t, moe->parts, moe->hidden / KT_PANEL_ROWS, compute_down);
    kt_run_tokens(pool, &t, combine_experts);
    kt_pool_leave(pool);
    return KTQ_OK;
}

int ktq_train_backward(ktq_pool *pool, const ktq_moe *moe, const ktq_call *call, const ktq_lora *lora,
                       const ktq_kept *kept, const ktq_gradients *gradients) {
    if (!gradients || (call && call->tokens && (!gradients->out || !gradients->hidden || !gradients->weights)))
        return KTQ_EINVAL;
    kt_training t = {.moe = moe, .call = call, .lora = lora, .kept = kept, .gradients = gradients};
    int error = begin_training(pool, &t);
    if (error) return error;
    if (call->tokens) memset(gradients->weights, 0, (size_t)(call->tokens * call->topk) * sizeof *gradients->weights);
    kt_run_blocks(pool, &t, weight_gradients);
    kt_run_panels(pool, &t, moe->parts, 0, backpropagate_down);
    if (lora || kt_quantizes_gradients(&t)) kt_run_blocks(pool, &t, prepare_gradients);
    for (; t.section * t.section_columns < moe->hidden; t.section++) {
        int64_t left = moe->hidden - t.section * t.section_columns;
        int64_t columns = left < t.section_columns ? left : t.section_columns;
        kt_run_panels(pool, &t, 1, columns / KT_PANEL_ROWS, backpropagate_gate_up);
        kt_run_tokens(pool, &t, sum_tokens);
    }
    if (lora) kt_run_factors(pool, &t);
    kt_pool_leave(pool);
    return KTQ_OK;
}
