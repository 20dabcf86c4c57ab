/* The forward and backward of a layer's routed experts for training LoRA (numerics.md, section 5c): their steps. A step
 * is divided into ranges, which threads execute in any order; the next step begins when all are done. Rows are (token,
 * expert) pairs, sorted by expert, as in moe.c; kernels take a block of rows at a time. */
#include <string.h>

#include "bf16.h"
#include "train.h"

/* --- the forward's steps ------------------------------------------------------------------------------------------ */

static const uint16_t *get_token_row(const kt_training *t, const uint16_t *rows, int64_t row) {
    return rows + t->row_pair[row] / t->call->topk * t->moe->hidden;
}

static void gather_inputs(const kt_training *t, const kt_range *block, const kt_train_scratch *s) {
    const kt_bucket *bucket = &t->pass.bucket[block->bucket];
    int64_t row = bucket->first + block->first, hidden = t->moe->hidden;
    uint16_t *x = t->x + row * hidden;
    for (int64_t i = 0; i < block->count; i++)
        memcpy(x + i * hidden, get_token_row(t, t->call->hidden, row + i), (size_t)hidden * sizeof *x);
    if (kt_uses_int8(t)) kt_quantize_block(t, block, x, hidden, hidden, &t->x8);
    for (int i = kt_first_projection(t); t->lora && i <= KT_PROJECTION_UP; i++)
        kt_project_inputs(t, i, bucket->expert, 0, hidden, x, hidden, row, block->count,
                          kt_rank_row(t, t->saved->rank_rows, i, row), s);
}

static void compute_gate_up(const kt_training *t, const kt_range *range, const kt_train_scratch *s) {
    const kt_bucket *bucket = &t->pass.bucket[range->bucket];
    const ktq_expert *expert = kt_expert_at(t, range->bucket, range->slice);
    const float *const bias[] = {expert->gate_bias, expert->up_bias};
    const int gated = !t->moe->function.ungated;
    uint16_t *const out[] = {t->saved->gate, t->saved->up};
    for (int64_t first = 0; first < bucket->m; first += KT_TOKEN_BLOCK) {
        int64_t m = bucket->m - first < KT_TOKEN_BLOCK ? bucket->m - first : KT_TOKEN_BLOCK;
        int64_t row = bucket->first + first;
        const kt_range block = {range->bucket, 0, first, m};
        int64_t at = row * t->columns + t->offset[range->slice] + range->first * KT_PANEL_ROWS;
        for (int i = kt_first_projection(t); i <= KT_PROJECTION_UP; i++) {
            kt_matrix w = kt_get_matrix(t, range->bucket, range->slice, i);
            kt_multiply_block(t, &block, &w, range->first, range->count, t->x + row * w.k, w.k, &t->x8,
                              s->c + i * KT_STEP_PANELS * m * KT_PANEL_ROWS, s);
        }
        for (int64_t p = 0; p < range->count; p++, at += KT_PANEL_ROWS) {
            float *c[2] = {s->c + p * m * KT_PANEL_ROWS, s->c + (KT_STEP_PANELS + p) * m * KT_PANEL_ROWS};
            for (int i = kt_first_projection(t); i <= KT_PROJECTION_UP; i++) {
                if (t->lora)
                    kt_project_from_rank(t, (kt_factor){1, i}, bucket->expert, at % t->columns,
                                         kt_rank_row(t, t->saved->rank_rows, i, row), m, s->lora_product, s);
                kt_add_bias(kt_bias_at(bias[i], (range->first + p) * KT_PANEL_ROWS), m, c[i], KT_PANEL_ROWS);
                kt_round_products(t, m, c[i], t->lora ? s->lora_product : NULL, out[i] + at, t->columns, s);
            }
            kt_activation job = {.function = &t->moe->function,
                                 .m = m,
                                 .gate = gated ? c[0] : c[1],
                                 .up = gated ? c[1] : NULL,
                                 .out = c[0],
                                 .out_pitch = KT_PANEL_ROWS};
            kt_activation_of(t->kernels, t->moe->function.activation)(&job);
            t->kernels->split_bf16(m, c[0], t->saved->act + at, NULL, t->columns);
        }
    }
}

static void prepare_down(const kt_training *t, const kt_range *block, const kt_train_scratch *s) {
    const kt_bucket *bucket = &t->pass.bucket[block->bucket];
    int64_t row = bucket->first + block->first;
    for (int64_t slice = 0; slice < t->moe->slices; slice++) {
        int64_t width = t->moe->width[slice], offset = t->offset[slice];
        const uint16_t *act = t->saved->act + row * t->columns + offset;
        if (kt_uses_int8(t)) kt_quantize_block(t, block, act, t->columns, width, &t->act8[slice]);
        if (t->lora)
            kt_project_inputs(t, KT_PROJECTION_DOWN, bucket->expert, offset, width, act, t->columns, row, block->count,
                              kt_rank_row(t, t->saved->rank_rows, KT_PROJECTION_DOWN + slice, row), s);
    }
}

static void compute_down(const kt_training *t, const kt_range *range, const kt_train_scratch *s) {
    const kt_bucket *bucket = &t->pass.bucket[range->bucket];
    const kt_matrix w = kt_get_matrix(t, range->bucket, range->slice, KT_PROJECTION_DOWN);
    for (int64_t first = 0; first < bucket->m; first += KT_TOKEN_BLOCK) {
        int64_t m = bucket->m - first < KT_TOKEN_BLOCK ? bucket->m - first : KT_TOKEN_BLOCK;
        int64_t row = bucket->first + first;
        const kt_range block = {range->bucket, 0, first, m};
        kt_multiply_block(t, &block, &w, range->first, range->count,
                          t->saved->act + row * t->columns + t->offset[range->slice], t->columns,
                          &t->act8[range->slice], s->c, s);
        for (int64_t p = 0; p < range->count; p++) {
            int64_t column = (range->first + p) * KT_PANEL_ROWS;
            if (t->lora)
                kt_project_from_rank(t, (kt_factor){1, KT_PROJECTION_DOWN}, bucket->expert, column,
                                     kt_rank_row(t, t->saved->rank_rows, KT_PROJECTION_DOWN + range->slice, row), m,
                                     s->lora_product, s);
            kt_add_bias(kt_bias_at(kt_expert_at(t, range->bucket, range->slice)->down_bias, column), m,
                        s->c + p * m * KT_PANEL_ROWS, KT_PANEL_ROWS);
            kt_round_products(t, m, s->c + p * m * KT_PANEL_ROWS, t->lora ? s->lora_product : NULL,
                              t->saved->down + (range->slice * t->pass.rows + row) * w.n + column, w.n, s);
        }
    }
}

static void combine_experts(const kt_training *t, const kt_range *range, const kt_train_scratch *s) {
    int64_t topk = t->call->topk, hidden = t->moe->hidden;
    const float *terms[] = {s->products, s->lora_product};
    for (int64_t token = range->first; token < range->first + range->count; token++) {
        memset(s->products, 0, (size_t)hidden * sizeof(float));
        for (int64_t slice = 0; slice < t->moe->slices; slice++)
            for (int64_t i = token * topk; i < (token + 1) * topk; i++) {
                if (t->pass.pair[i].row < 0) continue;
                const uint16_t *row = t->saved->down + (slice * t->pass.rows + t->pass.pair[i].row) * hidden;
                t->kernels->widen_scales(KT_BF16_SCALES, (const uint8_t *)row, hidden, s->lora_product);
                t->kernels->combine(2, terms, (float[]){1, t->call->weights[i]}, hidden, s->products);
            }
        t->kernels->merge(1, terms, hidden, t->call->out + token * hidden);
    }
}

/* --- the backward's steps ----------------------------------------------------------------------------------------- */

/* Dot product, added up in 8 partial sums. count: a multiple of 8. */
static float dot(const uint16_t *x, const uint16_t *y, int64_t count) {
    float sum[8] = {0};
    for (int64_t i = 0; i < count; i += 8)
        for (int j = 0; j < 8; j++) sum[j] += kt_from_bf16(x[i + j]) * kt_from_bf16(y[i + j]);
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

/* Rows of the output's gradient times their router weights, and the router weights' gradients. */
static void weight_gradients(const kt_training *t, const kt_range *block, const kt_train_scratch *s) {
    const kt_bucket *bucket = &t->pass.bucket[block->bucket];
    int64_t first = bucket->first + block->first, hidden = t->moe->hidden;
    const float *terms[] = {s->products};
    for (int64_t row = first; row < first + block->count; row++) {
        const uint16_t *gradient = get_token_row(t, t->gradients->out, row);
        t->kernels->widen_scales(KT_BF16_SCALES, (const uint8_t *)gradient, hidden, s->products);
        t->kernels->combine(1, terms, &t->call->weights[t->row_pair[row]], hidden, s->products);
        t->kernels->merge(1, terms, hidden, t->gradient + row * hidden);
        float sum = 0;
        for (int64_t slice = 0; slice < t->moe->slices; slice++)
            sum += dot(gradient, t->saved->down + (slice * t->pass.rows + row) * hidden, hidden);
        t->gradients->weights[t->row_pair[row]] = sum;
        if (t->lora) memcpy(t->x + row * hidden, get_token_row(t, t->call->hidden, row), (size_t)hidden * sizeof *t->x);
    }
    if (kt_quantizes_gradients(t)) kt_quantize_block(t, block, t->gradient + first * hidden, hidden, hidden, &t->x8);
    if (t->lora)
        kt_project_to_rank(t, (kt_factor){1, KT_PROJECTION_DOWN}, bucket->expert, 0, hidden,
                           t->gradient + first * hidden, hidden, block->count,
                           kt_rank_row(t, t->rank_gradient[KT_PROJECTION_DOWN], 0, first), s);
}

/* The gradients of gate and up from c[m][32], that of the activation. at: offset in arrays of [rows][columns]. */
static void activation_gradients(const kt_training *t, int64_t m, const float *c, int64_t at,
                                 const kt_train_scratch *s) {
    const int gated = !t->moe->function.ungated;
    float *gate = s->derivative, *up = gate + m * KT_PANEL_ROWS, *by_gate = up + m * KT_PANEL_ROWS;
    float *by_up = by_gate + m * KT_PANEL_ROWS;
    for (int64_t i = 0; i < m; i++) {
        const uint16_t *first = (gated ? t->saved->gate : t->saved->up) + at + i * t->columns;
        t->kernels->widen_scales(KT_BF16_SCALES, (const uint8_t *)first, KT_PANEL_ROWS, gate + i * KT_PANEL_ROWS);
        if (gated)
            t->kernels->widen_scales(KT_BF16_SCALES, (const uint8_t *)(t->saved->up + at + i * t->columns),
                                     KT_PANEL_ROWS, up + i * KT_PANEL_ROWS);
    }
    kt_activation job = {.function = &t->moe->function,
                         .m = m,
                         .gate = gate,
                         .up = gated ? up : NULL,
                         .by_gate = by_gate,
                         .by_up = by_up};
    kt_activation_of(t->kernels, t->moe->function.activation)(&job);
    for (int64_t i = 0; i < m * KT_PANEL_ROWS; i++) by_gate[i] *= c[i];
    for (int64_t i = 0; gated && i < m * KT_PANEL_ROWS; i++) by_up[i] *= c[i];
    t->kernels->split_bf16(m, by_gate, (gated ? t->gate_gradient : t->up_gradient) + at, NULL, t->columns);
    if (gated) t->kernels->split_bf16(m, by_up, t->up_gradient + at, NULL, t->columns);
}

/* The gradients of down's input, and from it of gate and up. */
static void backpropagate_down(const kt_training *t, const kt_range *range, const kt_train_scratch *s) {
    const kt_bucket *bucket = &t->pass.bucket[range->bucket];
    int64_t hidden = t->moe->hidden;
    kt_transpose_columns(t, range->bucket, range->slice, KT_PROJECTION_DOWN, range->first, range->count, s->transposed,
                         s);
    for (int64_t first = 0; first < bucket->m; first += KT_TOKEN_BLOCK) {
        int64_t m = bucket->m - first < KT_TOKEN_BLOCK ? bucket->m - first : KT_TOKEN_BLOCK;
        int64_t row = bucket->first + first;
        const kt_range block = {range->bucket, 0, first, m};
        kt_multiply_transposed(t, &block, range->slice, KT_PROJECTION_DOWN, range->first, range->count, s->transposed,
                               t->gradient + row * hidden, hidden, &t->x8, s->c, s);
        for (int64_t p = 0; p < range->count; p++) {
            int64_t column = t->offset[range->slice] + (range->first + p) * KT_PANEL_ROWS;
            int64_t at = row * t->columns + column;
            float *c = s->c + p * m * KT_PANEL_ROWS;
            if (t->lora)
                kt_project_from_rank(t, (kt_factor){0, KT_PROJECTION_DOWN}, bucket->expert, column,
                                     kt_rank_row(t, t->rank_gradient[KT_PROJECTION_DOWN], 0, row), m, s->lora_product,
                                     s);
            for (int64_t i = 0; t->lora && t->lora->dropout > 0 && i < m; i++)
                kt_drop_floats(t, KT_PROJECTION_DOWN, row + i, column, KT_PANEL_ROWS,
                               s->lora_product + i * KT_PANEL_ROWS);
            kt_round_products(t, m, c, t->lora ? s->lora_product : NULL, NULL, 0, s);
            activation_gradients(t, m, c, at, s);
        }
    }
}

static void prepare_gradients(const kt_training *t, const kt_range *block, const kt_train_scratch *s) {
    const kt_bucket *bucket = &t->pass.bucket[block->bucket];
    int64_t row = bucket->first + block->first;
    for (int i = kt_first_projection(t); i <= KT_PROJECTION_UP; i++) {
        const uint16_t *rows = (i ? t->up_gradient : t->gate_gradient) + row * t->columns;
        for (int64_t slice = 0; kt_quantizes_gradients(t) && slice < t->moe->slices; slice++)
            kt_quantize_block(t, block, rows + t->offset[slice], t->columns, t->moe->width[slice],
                              &(i ? t->up8 : t->act8)[slice]);
        if (t->lora)
            kt_project_to_rank(t, (kt_factor){1, i}, bucket->expert, 0, t->columns, rows, t->columns, block->count,
                               kt_rank_row(t, t->rank_gradient[i], 0, row), s);
    }
}

/* A section of the gradients of each row's input, from gate and up. */
static void backpropagate_gate_up(const kt_training *t, const kt_range *range, const kt_train_scratch *s) {
    const kt_bucket *bucket = &t->pass.bucket[range->bucket];
    int64_t panel = t->section * t->section_columns / KT_PANEL_ROWS + range->first, column = panel * KT_PANEL_ROWS;
    for (int64_t slice = 0; slice < t->moe->slices; slice++) {
        int64_t width = t->moe->width[slice];
        uint16_t *transposed[] = {s->transposed, s->transposed + KT_STEP_PANELS * KT_PANEL_ROWS * width};
        for (int i = kt_first_projection(t); i <= KT_PROJECTION_UP; i++)
            kt_transpose_columns(t, range->bucket, slice, i, panel, range->count, transposed[i], s);
        for (int64_t first = 0; first < bucket->m; first += KT_TOKEN_BLOCK) {
            int64_t m = bucket->m - first < KT_TOKEN_BLOCK ? bucket->m - first : KT_TOKEN_BLOCK;
            int64_t row = bucket->first + first, at = row * t->columns + t->offset[slice];
            const kt_range block = {range->bucket, 0, first, m};
            float *c[] = {s->c, s->c + KT_STEP_PANELS * m * KT_PANEL_ROWS};
            for (int i = kt_first_projection(t); i <= KT_PROJECTION_UP; i++)
                kt_multiply_transposed(t, &block, slice, i, panel, range->count, transposed[i],
                                       (i ? t->up_gradient : t->gate_gradient) + at, t->columns,
                                       &(i ? t->up8 : t->act8)[slice], c[i], s);
            for (int64_t p = 0; p < range->count; p++, c[0] += m * KT_PANEL_ROWS, c[1] += m * KT_PANEL_ROWS) {
                const float *sums[] = {c[0], c[1], s->lora_product, s->products};
                const float weights[] = {1, 1, t->scaling, 1};
                float *out = t->x_gradient + row * t->section_columns + (range->first + p) * KT_PANEL_ROWS;
                if (t->moe->function.ungated) memset(c[0], 0, (size_t)(m * KT_PANEL_ROWS) * sizeof *c[0]);
                t->kernels->combine(2, sums, weights, m * KT_PANEL_ROWS, c[0]);
                sums[1] = s->lora_product;
                for (int i = kt_first_projection(t); t->lora && !slice && i <= KT_PROJECTION_UP; i++) {
                    kt_project_from_rank(t, (kt_factor){0, i}, bucket->expert, column + p * KT_PANEL_ROWS,
                                         kt_rank_row(t, t->rank_gradient[i], 0, row), m, s->lora_product, s);
                    for (int64_t j = 0; t->lora->dropout > 0 && j < m; j++)
                        kt_drop_floats(t, i, row + j, column + p * KT_PANEL_ROWS, KT_PANEL_ROWS,
                                       s->lora_product + j * KT_PANEL_ROWS);
                    t->kernels->combine(2, sums, weights + 1, m * KT_PANEL_ROWS, c[0]);
                }
                for (int64_t j = 0; j < m; j++, out += t->section_columns) {
                    const float *both[] = {out, c[0] + j * KT_PANEL_ROWS};
                    if (slice) t->kernels->combine(2, both, (float[]){1, 1}, KT_PANEL_ROWS, out);
                    else memcpy(out, both[1], KT_PANEL_ROWS * sizeof *out);
                }
            }
        }
    }
}

/* The gradient of a token's hidden state: the sum over its experts, in the router's order. */
static void sum_tokens(const kt_training *t, const kt_range *range, const kt_train_scratch *s) {
    int64_t topk = t->call->topk, hidden = t->moe->hidden, column = t->section * t->section_columns;
    int64_t columns = hidden - column < t->section_columns ? hidden - column : t->section_columns;
    for (int64_t token = range->first; token < range->first + range->count; token++) {
        memset(s->products, 0, (size_t)columns * sizeof(float));
        for (int64_t i = token * topk; i < (token + 1) * topk; i++) {
            if (t->pass.pair[i].row < 0) continue;
            const float *terms[] = {s->products, t->x_gradient + t->pass.pair[i].row * t->section_columns};
            t->kernels->combine(2, terms, (float[]){1, 1}, columns, s->products);
        }
        t->kernels->merge(1, (const float *const[]){s->products}, columns,
                          t->gradients->hidden + token * hidden + column);
    }
}

/* --- entry points ------------------------------------------------------------------------------------------------- */

int ktq_trainable(const ktq_moe *moe) {
    const int formats[] = {moe->gate_format, moe->up_format, moe->down_format};
    for (int i = 0; i < KT_PROJECTIONS; i++)
        if (kt_get_format(formats[i])->least || kt_get_format(formats[i])->two_terms) return 0;
    return !moe->function.weights_on_input;
}

static int check_training(const kt_training *t) {
    const ktq_activations *saved = t->saved;
    if (!saved || t->call->norm || !ktq_trainable(t->moe)) return KTQ_EINVAL;
    for (int64_t slice = 0; t->moe->transposed && slice < t->moe->slices; slice++) {
        int64_t width = t->moe->width[slice], hidden = t->moe->hidden;
        int error = kt_check_size(kt_get_format(t->moe->gate_format), hidden, width);
        if (!error) error = kt_check_size(kt_get_format(t->moe->up_format), hidden, width);
        if (!error) error = kt_check_size(kt_get_format(t->moe->down_format), width, hidden);
        if (error) return error;
    }
    int has_gate = saved->gate || t->moe->function.ungated;
    if (t->call->tokens && (!has_gate || !saved->up || !saved->act || !saved->down)) return KTQ_EINVAL;
    if (!t->lora) return KTQ_OK;
    if (t->lora->rank < 1 || t->lora->rank > KTQ_MAX_RANK) return KTQ_EINVAL;
    if (!(t->lora->dropout >= 0 && t->lora->dropout < 1) || (t->call->tokens && !saved->rank_rows)) return KTQ_EINVAL;
    for (int i = kt_first_projection(t); i < KT_PROJECTIONS; i++) {
        if (!t->lora->a[i] || !t->lora->b[i]) return KTQ_EINVAL;
        if (t->gradients && (!t->gradients->a[i] || !t->gradients->b[i])) return KTQ_EINVAL;
    }
    return KTQ_OK;
}

/* Checks the call, enters the pool, sorts the tokens and allocates memory. The caller calls kt_pool_leave. */
static int begin_training(ktq_pool *pool, kt_training *t) {
    int error = pool ? kt_check_call(t->moe, t->call) : KTQ_EINVAL;
    if (!error) error = check_training(t);
    if (!error) error = kt_pool_enter(pool);
    if (error) return error;
    const ktq_moe *moe = t->moe;
    int groups = kt_pool_groups(pool) < moe->slices ? kt_pool_groups(pool) : (int)moe->slices;
    t->pass = (kt_pass){.moe = moe,
                        .gate = kt_get_format(moe->gate_format),
                        .up = kt_get_format(moe->up_format),
                        .down = kt_get_format(moe->down_format),
                        .call = t->call,
                        .tokens = t->call->tokens,
                        .groups = groups};
    t->kernels = kt_current();
    t->width = kt_widest_slice(moe);
    for (int64_t slice = 0; slice < moe->slices; slice++) {
        t->offset[slice] = t->columns;
        t->columns += moe->width[slice];
    }
    if (t->lora) {
        t->rank_columns = ktq_rank_columns(t->lora->rank);
        t->scaling = t->lora->scaling / (1 - t->lora->dropout);
    }
    error = kt_sort_and_allocate(pool, t);
    if (error) kt_pool_leave(pool);
    return error;
}

int ktq_train_forward(ktq_pool *pool, const ktq_moe *moe, const ktq_call *call, const ktq_lora *lora,
                      const ktq_activations *saved) {
    kt_training t = {.moe = moe, .call = call, .lora = lora, .saved = saved};
    int error = begin_training(pool, &t);
    if (error) return error;
    kt_run_blocks(pool, &t, gather_inputs);
    kt_run_panels(pool, &t, moe->slices, 0, compute_gate_up);
    if (lora || kt_uses_int8(&t)) kt_run_blocks(pool, &t, prepare_down);
    kt_run_panels(pool, &t, moe->slices, moe->hidden / KT_PANEL_ROWS, compute_down);
    kt_run_tokens(pool, &t, combine_experts);
    kt_pool_leave(pool);
    return KTQ_OK;
}

int ktq_train_backward(ktq_pool *pool, const ktq_moe *moe, const ktq_call *call, const ktq_lora *lora,
                       const ktq_activations *saved, const ktq_gradients *gradients) {
    if (!gradients || (call && call->tokens && (!gradients->out || !gradients->hidden || !gradients->weights)))
        return KTQ_EINVAL;
    kt_training t = {.moe = moe, .call = call, .lora = lora, .saved = saved, .gradients = gradients};
    int error = begin_training(pool, &t);
    if (error) return error;
    if (call->tokens) memset(gradients->weights, 0, (size_t)(call->tokens * call->topk) * sizeof *gradients->weights);
    kt_run_blocks(pool, &t, weight_gradients);
    kt_run_panels(pool, &t, moe->slices, 0, backpropagate_down);
    if (lora || kt_quantizes_gradients(&t)) kt_run_blocks(pool, &t, prepare_gradients);
    for (; t.section * t.section_columns < moe->hidden; t.section++) {
        int64_t remaining = moe->hidden - t.section * t.section_columns;
        int64_t columns = remaining < t.section_columns ? remaining : t.section_columns;
        kt_run_panels(pool, &t, 1, columns / KT_PANEL_ROWS, backpropagate_gate_up);
        kt_run_tokens(pool, &t, sum_tokens);
    }
    if (lora) kt_run_factors(pool, &t);
    kt_pool_leave(pool);
    return KTQ_OK;
}
