/* Attention of one token by the threads of a pool. A task is a span of keys of one head, for at most KT_SPAN_QUERIES
 * queries; the last task of these queries adds up their spans. */
#include "vectors_scalar.h"

#include "exponential_template.h"
#include "moe.h"

typedef struct {
    const ktq_attention *call;
    const kt_kernels *kernels;
    int64_t spans, blocks, together; /* blocks: of `together` queries, for each head */
    _Atomic int64_t next;            /* task: (head, block, span) */
    _Atomic int64_t *done;           /* [heads][blocks]: spans */
    /* [heads][blocks][together][spans], and [value_size] for out; rows: addresses of out. */
    float *out, *greatest, *sum;
    const float **rows;
} attention;

static int64_t count_queries(const attention *job, int64_t item) {
    const int64_t rest = job->call->queries - item % job->blocks * job->together;
    return rest < job->together ? rest : job->together;
}

/* Index of the first query of an item (head, block) among those of all heads. */
static int64_t find_query(const attention *job, int64_t item) {
    return item / job->blocks * job->call->queries + item % job->blocks * job->together;
}

static void attend_to_span(const attention *job, int64_t item, int64_t span) {
    const ktq_attention *call = job->call;
    const int64_t first = span * KT_SPAN, head = item / job->blocks, result = item * job->together * job->spans + span;
    job->kernels->attend_span(&(kt_span){
        .queries = count_queries(job, item),
        .keys = call->keys - first < KT_SPAN ? call->keys - first : KT_SPAN,
        .size = call->size,
        .value_size = call->value_size,
        .scale = call->scale,
        .q = call->q + find_query(job, item) * call->size,
        .k = (const uint8_t *)(call->k + head * call->key_stride + first * call->size),
        .v = (const uint8_t *)(call->v + head * call->value_stride + first * call->value_size),
        .pitch = job->spans,
        .out = job->out + result * call->value_size,
        .greatest = job->greatest + result,
        .sum = job->sum + result,
    });
}

/* Adds up the spans of a query, whose results begin at `first`: each weighs exp(its greatest product - that of all). */
static void merge_spans(const attention *job, int64_t first, uint16_t *out) {
    const int64_t size = job->call->value_size;
    float *weight = job->greatest + first, *values = job->out + first * size, greatest = -INFINITY, sum = 0;
    const float **rows = job->rows + first;
    for (int64_t s = 0; s < job->spans; s++) greatest = max_ps(greatest, weight[s]);
    for (int64_t s = 0; s < job->spans; s++) {
        weight[s] = kt_exp(weight[s] - greatest);
        sum = fmaf(weight[s], job->sum[first + s], sum);
        rows[s] = values + s * size;
    }
    /* Each block of columns is read before it is written. */
    job->kernels->combine(job->spans, rows, weight, size, values);
    for (int64_t c = 0; c < size; c++) out[c] = kt_to_bf16(values[c] / sum);
}

static void work(void *argument, int group, int worker) {
    (void)group, (void)worker;
    attention *job = argument;
    const int64_t items = job->call->heads * job->blocks;
    kt_fp_state before = kt_enter();
    for (int64_t task; (task = atomic_fetch_add(&job->next, 1)) < items * job->spans;) {
        const int64_t item = task / job->spans;
        attend_to_span(job, item, task % job->spans);
        if (atomic_fetch_add(&job->done[item], 1) + 1 < job->spans) continue;
        uint16_t *out = job->call->out + find_query(job, item) * job->call->value_size;
        for (int64_t q = 0; q < count_queries(job, item); q++)
            merge_spans(job, (item * job->together + q) * job->spans, out + q * job->call->value_size);
    }
    kt_leave(before);
}

static void allocate(attention *job, kt_arena *arena) {
    const int64_t items = job->call->heads * job->blocks, results = items * job->together * job->spans;
    KT_ALLOCATE(job->done, items);
    KT_ALLOCATE(job->out, results * job->call->value_size);
    KT_ALLOCATE(job->greatest, results);
    KT_ALLOCATE(job->sum, results);
    KT_ALLOCATE(job->rows, results);
}

int ktq_attend(ktq_pool *pool, const ktq_attention *call) {
    if (!pool || !call->q || !call->k || !call->v || !call->out) return KTQ_EINVAL;
    if (call->heads < 1 || call->queries < 1 || call->keys < 1) return KTQ_EINVAL;
    if (call->size < 1 || call->size % KTQ_ROW_MULTIPLE) return KTQ_ESHAPE;
    if (call->value_size < 1 || call->value_size % KTQ_ROW_MULTIPLE) return KTQ_ESHAPE;
    int error = kt_pool_enter(pool);
    if (error) return error;
    const int64_t blocks = kt_ceil_divide(call->queries, KT_SPAN_QUERIES);
    attention job = {.call = call,
                     .kernels = kt_current(),
                     .spans = kt_ceil_divide(call->keys, KT_SPAN),
                     .blocks = blocks,
                     .together = kt_ceil_divide(call->queries, blocks)};
    kt_arena needed = {0};
    allocate(&job, &needed);
    kt_arena memory = {.base = kt_pool_memory(pool, needed.used, 0)};
    if (memory.base) {
        allocate(&job, &memory);
        memset(job.done, 0, (size_t)(call->heads * blocks) * sizeof *job.done);
        kt_pool_run(pool, work, &job);
        kt_unpoison_gaps(&memory);
    }
    kt_pool_leave(pool);
    return memory.base ? KTQ_OK : KTQ_ENOMEM;
}
