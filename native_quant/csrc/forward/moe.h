/* One forward of a layer's routed experts, cut into tasks (moe.c plans, moe_tasks.c works). */
#ifndef KT_MOE_H
#define KT_MOE_H

#include <stdatomic.h>

#include "kernels.h"
#include "system/pool.h"

enum {
    KT_TOKEN_BLOCK = 256, /* tokens of an expert that go through a kernel at a time: their activations stay in L2 */
    KT_MAX_STRIPS = 16,   /* strips that a task multiplies at a time */
    KT_ROW_BLOCK = 16,    /* rows that are quantized, or tokens that are combined, by one task */
};

enum { KT_QUANTIZE, KT_GATE_UP, KT_REQUANTIZE, KT_DOWN, KT_COMBINE };

/* The unit that a thread claims. It waits only for tasks that were claimed before it, so the oldest unfinished one
 * never waits. */
typedef struct {
    int kind, part;      /* part: counted among those of the group */
    int64_t bucket;      /* GATE_UP, REQUANTIZE, DOWN */
    int64_t panel;       /* DOWN, COMBINE */
    int64_t first, count; /* strips (GATE_UP: of gate and of up; DOWN: of the panel), rows, or tokens */
} kt_task;

/* The tokens that go to one expert: rows first .. first + m - 1 of everything that has a row per (token, expert). */
typedef struct {
    int64_t expert, first, m;
} kt_bucket;

/* The work of one group of threads (NUMA node): all tasks of its parts. */
typedef struct {
    int64_t parts, *part;
    kt_task *task;
    int64_t tasks;
    _Alignas(64) atomic_llong next;
    _Alignas(64) atomic_int to_quantize;
    atomic_int *gate_up_left, *requantize_left; /* [parts][buckets] */
    atomic_int *down_left, *combine_left;       /* [panels] */

    int8_t *a; /* [rows][hidden]: the activations of each row's token */
    float *a_scale;
    int32_t *a_sums;
    float *h; /* [parts][rows][width]: silu(gate) * up */
    /* [parts][2 * rows]: a bucket has room for 2 m rows: its m, then the remainders of the coarse ones. */
    int8_t *hq;
    float *h_scale;
    int32_t *h_sums;
    int64_t *remainder_of;  /* [parts][2 * rows]: whose remainder it is, counted in the bucket */
    atomic_int *remainders; /* [parts][buckets] */
    float *y; /* [2][parts][rows][panel columns]: the output of down; panels alternate */
} kt_group;

typedef struct {
    int32_t *c; /* [KT_MAX_STRIPS][KT_TOKEN_BLOCK][32] */
    uint8_t *gemm;
    float *sums; /* [parts][panel columns] */
    const float **rows;
    float *weights;
} kt_worker_scratch;

typedef struct {
    const ktq_moe *moe;
    const ktq_call *call;
    const kt_kernels *kernels;
    int64_t first_token, tokens; /* this pass */
    int64_t rows, buckets, panels, panel_columns;
    kt_bucket *bucket;
    int64_t *token_of; /* [rows] */
    int64_t *row_of;   /* [tokens][topk]; -1: none */
    int groups;
    kt_group *group;
    kt_worker_scratch *scratch;
    /* Only with several groups: [parts][tokens][hidden], merged in the end. */
    float *partial;
    int64_t merge_tasks;
    _Alignas(64) atomic_llong next_merge;
} kt_pass;

/* moe_tasks.c: works off the tasks of `group`, then those that others left, then the merge. */
void kt_moe_work(void *pass, int group, int worker);

/* The first row of a bucket in hq and what goes with it. */
static inline int64_t kt_h_row(const kt_pass *pass, int64_t part, int64_t bucket) {
    return 2 * (part * pass->rows + pass->bucket[bucket].first);
}

static inline int64_t kt_blocks(int64_t n, int64_t size) {
    return (n + size - 1) / size;
}

#endif
