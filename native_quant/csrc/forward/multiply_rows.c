/* A linear of a model whose weight is in rows, for few tokens, by the threads of a pool. */
#include <math.h>
#include <stdatomic.h>

#include "bf16.h"
#include "cpu.h"
#include "kernels.h"
#include "system/pool.h"

enum { TASK_ROWS = 64, LARGEST_INT16 = 32767 };
#define LEAST 0x1p-100f

/* weight: BF16, or NULL; then codes, scales, and x as int16_x times the factor of a token. */
typedef struct {
    int64_t tokens, n, k;
    const uint16_t *weight;
    const int8_t *codes;
    const uint16_t *scales;
    const uint16_t *bias, *x;
    uint16_t *out;
    int16_t *int16_x;
    float factor[KTQ_ROW_TOKENS];
    const kt_kernels *kernels;
    _Atomic int64_t next; /* row */
} linear;

static void multiply(const linear *job, int64_t first) {
    float products[TASK_ROWS * KTQ_ROW_TOKENS];
    const int64_t rows = job->n - first < TASK_ROWS ? job->n - first : TASK_ROWS, groups = job->k / KTQ_ROW_MULTIPLE;
    if (job->weight)
        job->kernels->row_products(&(kt_row_products){.rows = rows,
                                                      .k = job->k,
                                                      .m = job->tokens,
                                                      .weight = (const uint8_t *)(job->weight + first * job->k),
                                                      .x = job->x,
                                                      .out = products});
    else
        job->kernels->int8_row_products(
            &(kt_int8_row_products){.rows = rows,
                                    .k = job->k,
                                    .m = job->tokens,
                                    .codes = job->codes + first * job->k,
                                    .scales = (const uint8_t *)(job->scales + first * groups),
                                    .x = job->int16_x,
                                    .out = products});
    for (int64_t r = 0; r < rows; r++)
        for (int64_t t = 0; t < job->tokens; t++) {
            float sum = products[r * job->tokens + t];
            if (!job->weight) sum *= job->factor[t];
            if (job->bias) sum += kt_from_bf16(job->bias[first + r]);
            job->out[t * job->n + first + r] = kt_to_bf16(sum);
        }
}

static void work(void *job, int group, int worker) {
    (void)group, (void)worker;
    linear *state = job;
    kt_fp_state before = kt_enter();
    for (int64_t row; (row = atomic_fetch_add(&state->next, TASK_ROWS)) < state->n;) multiply(state, row);
    kt_leave(before);
}

/* Rounds each token to integers of 16 bits; one whose magnitudes are all below LEAST counts as zeros. The factor of a
 * token with an infinity or a NaN is NaN, and so are its outputs. */
static void round_tokens(linear *job) {
    kt_fp_state before = kt_enter();
    for (int64_t t = 0; t < job->tokens; t++) {
        const uint16_t *x = job->x + t * job->k;
        unsigned most = 0; /* BF16 without sign: in the order of the magnitudes, and above them infinity and NaN */
        for (int64_t j = 0; j < job->k; j++) most = (x[j] & KT_BF16_MAGNITUDE) > most ? x[j] & KT_BF16_MAGNITUDE : most;
        const float amax = kt_from_bf16((uint16_t)most);
        const float steps = most < KT_BF16_INFINITY && amax >= LEAST ? LARGEST_INT16 / amax : 0;
        job->factor[t] = most >= KT_BF16_INFINITY ? kt_from_bf16(KT_BF16_NAN) : steps > 0 ? amax / LARGEST_INT16 : 0;
        for (int64_t j = 0; j < job->k; j++)
            job->int16_x[t * job->k + j] = steps > 0 ? (int16_t)lrintf(kt_from_bf16(x[j]) * steps) : 0;
    }
    kt_leave(before);
}

static int run(ktq_pool *pool, linear *job) {
    if (!pool || !job->x || !job->out || job->tokens < 1 || job->tokens > KTQ_ROW_TOKENS || job->n < 1)
        return KTQ_EINVAL;
    if (job->k < 1 || job->k % KTQ_ROW_MULTIPLE) return KTQ_ESHAPE;
    int error = kt_pool_enter(pool);
    if (error) return error;
    job->kernels = kt_current();
    if (!job->weight) {
        job->int16_x = kt_pool_memory(pool, (size_t)(job->tokens * job->k) * sizeof *job->int16_x, 0);
        if (job->int16_x) round_tokens(job);
    }
    const int is_ready = job->weight || job->int16_x;
    if (is_ready) kt_pool_run(pool, work, job);
    kt_pool_leave(pool);
    return is_ready ? KTQ_OK : KTQ_ENOMEM;
}

int ktq_multiply_rows(ktq_pool *pool, int64_t tokens, int64_t n, int64_t k, const uint16_t *weight,
                      const uint16_t *bias, const uint16_t *x, uint16_t *out) {
    if (!weight) return KTQ_EINVAL;
    return run(pool, &(linear){.tokens = tokens, .n = n, .k = k, .weight = weight, .bias = bias, .x = x, .out = out});
}

int ktq_multiply_int8_rows(ktq_pool *pool, int64_t tokens, int64_t n, int64_t k, const int8_t *codes,
                           const uint16_t *scales, const uint16_t *bias, const uint16_t *x, uint16_t *out) {
    if (!codes || !scales) return KTQ_EINVAL;
    linear job = {.tokens = tokens, .n = n, .k = k, .codes = codes, .scales = scales, .bias = bias, .x = x, .out = out};
    return run(pool, &job);
}
