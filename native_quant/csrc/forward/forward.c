/* ktq_forward. moe.c computes it, except for experts whose outputs are normalized before they are weighted (norm):
 *
 *     out[t] = sum over j of weights[t][j] * n(expert j of hidden[t]),  n(y) = z / sqrt(mean(z^2) + epsilon),
 *     z = y * norm
 *
 * A norm needs all columns of all NUMA slices, so each pair of a token and an expert passes through moe.c as a token of
 * its own, whose output is BF16; then the tokens' pairs are normalized and added. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bf16.h"
#include "moe.h"

enum { PAIRS_BUDGET = 64 << 20 }; /* bytes of the inputs and outputs of the pairs that are computed at a time */

typedef struct {
    const ktq_moe *moe;
    const ktq_call *call;
    int64_t first_token, tokens;
    const uint16_t *y; /* [tokens][topk][hidden] */
    float *factor;     /* [tokens][topk]: of each pair's z */
    atomic_llong next;
} normed_pairs;

static float find_factor(const ktq_moe *moe, const ktq_call *call, const uint16_t *y, float weight) {
    double squares = 0;
    for (int64_t c = 0; c < moe->hidden; c++) {
        float z = kt_from_bf16(y[c]) * call->norm[c];
        squares += (double)z * (double)z;
    }
    return (float)(weight / sqrt(squares / (double)moe->hidden + call->norm_epsilon));
}

static void add_pairs(const normed_pairs *pairs, int64_t t) {
    const ktq_moe *moe = pairs->moe;
    const ktq_call *call = pairs->call;
    int64_t topk = call->topk, hidden = moe->hidden;
    const uint16_t *y = pairs->y + t * topk * hidden;
    float *factor = pairs->factor + t * topk;
    const float *weights = call->weights + (pairs->first_token + t) * topk;
    uint16_t *out = call->out + (pairs->first_token + t) * hidden;
    for (int64_t j = 0; j < topk; j++)
        factor[j] = find_factor(moe, call, y + j * hidden, kt_output_weight(moe, weights[j]));
    for (int64_t column = 0; column < hidden; column += KT_PANEL_ROWS) {
        float sums[KT_PANEL_ROWS] = {0};
        for (int64_t j = 0; j < topk; j++)
            for (int64_t c = 0; c < KT_PANEL_ROWS; c++)
                sums[c] += factor[j] * (kt_from_bf16(y[j * hidden + column + c]) * call->norm[column + c]);
        for (int64_t c = 0; c < KT_PANEL_ROWS; c++) {
            if (call->add) sums[c] += kt_from_bf16(out[column + c]);
            out[column + c] = kt_to_bf16(sums[c]);
        }
    }
}

static void run_tasks(void *argument, int group, int worker) {
    normed_pairs *pairs = argument;
    (void)group, (void)worker;
    kt_fp_state state = kt_enter_forward();
    int64_t t;
    while ((t = atomic_fetch_add_explicit(&pairs->next, 1, memory_order_relaxed)) < pairs->tokens) add_pairs(pairs, t);
    kt_leave(state);
}

static int forward_normed(ktq_pool *pool, const ktq_moe *moe, const ktq_call *call) {
    int64_t topk = call->topk, hidden = moe->hidden;
    int64_t step = PAIRS_BUDGET / (2 * (int64_t)sizeof(uint16_t) * hidden * topk);
    if (step < 1) step = 1;
    if (step > call->tokens) step = call->tokens;
    if (!step) return KTQ_OK;
    uint16_t *x = malloc((size_t)(2 * step * topk * hidden) * sizeof *x), *y = x + step * topk * hidden;
    float *factor = malloc((size_t)(step * topk) * sizeof *factor);
    int error = x && factor ? KTQ_OK : KTQ_ENOMEM;
    for (int64_t first = 0; !error && first < call->tokens; first += step) {
        int64_t tokens = call->tokens - first < step ? call->tokens - first : step;
        for (int64_t i = 0; i < tokens * topk; i++) {
            memcpy(x + i * hidden, call->hidden + (first + i / topk) * hidden, (size_t)hidden * sizeof *x);
            factor[i] = 1;
        }
        ktq_call each = *call;
        each.tokens = tokens * topk;
        each.topk = 1;
        each.hidden = x;
        each.ids = call->ids + first * topk;
        each.weights = moe->function.weights_on_input ? call->weights + first * topk : factor;
        each.out = y;
        each.add = 0;
        each.norm = NULL;
        error = kt_run_passes(pool, moe, &each);
        normed_pairs pairs = {moe, call, first, tokens, y, factor, 0};
        if (!error) kt_pool_run(pool, run_tasks, &pairs);
    }
    free(x);
    free(factor);
    return error;
}

int ktq_forward(ktq_pool *pool, const ktq_moe *moe, const ktq_call *call) {
    int error = pool ? kt_check_call(moe, call) : KTQ_EINVAL;
    if (!error) error = kt_pool_enter(pool);
    if (error) return error;
    error = call->norm ? forward_normed(pool, moe, call) : kt_run_passes(pool, moe, call);
    kt_pool_leave(pool);
    return error;
}
