/* A linear of a model whose weight is BF16 in rows, for few tokens, by the threads of a pool. */
#include <stdatomic.h>

#include "bf16.h"
#include "cpu.h"
#include "kernels.h"
#include "system/pool.h"

enum { TASK_ROWS = 64 };

typedef struct {
    int64_t tokens, n, k;
    const uint16_t *weight, *bias, *x;
    uint16_t *out;
    const kt_kernels *kernels;
    _Atomic int64_t next; /* row */
} linear;

static void multiply(const linear *job, int64_t first) {
    float products[TASK_ROWS * KTQ_ROW_TOKENS];
    const int64_t rows = job->n - first < TASK_ROWS ? job->n - first : TASK_ROWS;
    job->kernels->row_products(&(kt_row_products){.rows = rows,
                                                  .k = job->k,
                                                  .m = job->tokens,
                                                  .weight = (const uint8_t *)(job->weight + first * job->k),
                                                  .x = job->x,
                                                  .out = products});
    for (int64_t r = 0; r < rows; r++)
        for (int64_t t = 0; t < job->tokens; t++) {
            float sum = products[r * job->tokens + t];
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

int ktq_multiply_rows(ktq_pool *pool, int64_t tokens, int64_t n, int64_t k, const uint16_t *weight,
                      const uint16_t *bias, const uint16_t *x, uint16_t *out) {
    if (!pool || !weight || !x || !out || tokens < 1 || tokens > KTQ_ROW_TOKENS || n < 1) return KTQ_EINVAL;
    if (k < 1 || k % KTQ_ROW_MULTIPLE) return KTQ_ESHAPE;
    int error = kt_pool_enter(pool);
    if (error) return error;
    linear job = {tokens, n, k, weight, bias, x, out, .kernels = kt_current()};
    kt_pool_run(pool, work, &job);
    kt_pool_leave(pool);
    return KTQ_OK;
}
