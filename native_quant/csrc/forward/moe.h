/* One forward of a layer's routed experts, cut into tasks: moe.c plans them, moe_tasks.c runs them. */
#ifndef KT_MOE_H
#define KT_MOE_H

#include <stdatomic.h>
#include <stddef.h>

#include "formats.h"
#include "system/pool.h"

enum {
    KT_TOKEN_BLOCK = 256, /* BF16 tokens of an expert that a kernel takes at a time: they stay in L2 */
    KT_MAX_PANELS = 16,   /* panels that a task multiplies at a time */
    /* Rows of sums: each token may have a second row for its remainder, and the last tile is whole. */
    KT_MAX_SUMS = 2 * KT_MAX_TOKENS + KT_MAX_TILE_ROWS,
    KT_ROW_BLOCK = 16, /* rows that one task quantizes, or tokens that it combines */
    /* The last GATE_UP task of a bucket with at most this many rows requantizes them all, because it has some of h in
       cache; larger buckets are divided among tasks. That saves 1 to 2 % of a forward of Qwen3-30B-A3B's shape. */
    KT_REQUANTIZED_AT_ONCE = 64,
};

enum { KT_QUANTIZE, KT_GATE_UP, KT_REQUANTIZE, KT_DOWN, KT_COMBINE };

/* The unit that a thread claims. It waits only for tasks that were claimed before it, so the oldest unfinished one
 * never waits. */
typedef struct {
    int kind;             /* KT_QUANTIZE .. KT_COMBINE */
    int slice;            /* index into kt_group.slice_number */
    int64_t bucket;       /* for GATE_UP, REQUANTIZE and DOWN */
    int64_t section;      /* for DOWN and COMBINE */
    int64_t first, count; /* panels (of gate and up, or of the section of down), rows, or tokens */
} kt_task;

/* The m tokens of one expert: rows first .. first + m - 1 of each array that has a row for each kt_pair. */
typedef struct {
    int64_t expert, first, m;
} kt_bucket;

/* A token and one of its experts. */
typedef struct {
    int64_t row; /* row of the pair in arrays with a row for each pair; -1: the expert is skipped */
    int64_t bucket;
} kt_pair;

/* Activations of int8 arithmetic. Codes are stored in tiles (kt_tiling); each bucket has memory for whole tiles. */
typedef struct {
    int8_t *a;      /* codes of the hidden state of each row's token */
    float *a_scale; /* [rows] */
    int32_t *a_sums;
    double *coarse; /* [rows]: if the mean square of h's codes is lower, the row needs a remainder */
    float *h;       /* [slices][rows][width]: value of the activation */
    /* Codes of h: for each slice and bucket, 2 m rows and space for whole tiles. A block has the tokens of one call of
       the kernel: first its rows, then the remainders of its coarse rows. */
    int8_t *hq;
    float *h_scale;
    int32_t *h_sums;
    int32_t *remainder_row; /* row of each row's remainder, counted from the block's first row; 0: no remainder */
    atomic_int *remainders; /* [slices][blocks]: number of remainders */
} kt_int8_activations;

/* Activations of BF16 arithmetic. */
typedef struct {
    uint16_t *a; /* [rows][hidden]: hidden state of each row's token */
    /* Value of the activation: [slices][terms of down * rows][width of the slice]. Slices are as far apart as the
       widest slice requires. Each block of tokens has its first terms before its second terms. */
    uint16_t *h;
    float *a_sums, *h_sums; /* sums of each KT_SUM_COLUMNS columns; NULL if no weight has least values */
} kt_bf16_activations;

/* The work of one group of threads (NUMA node): all tasks of its slices. */
typedef struct {
    int64_t slices, *slice_number; /* [slices]: number of each slice in the layer */
    kt_task *task;
    int64_t tasks, threads;
    _Alignas(64) atomic_llong next;
    _Alignas(64) atomic_int quantize_pending;
    /* Numbers of unfinished tasks: [slices][buckets] (requantize_pending: NULL without requantization), [sections]. */
    atomic_int *gate_up_pending, *requantize_pending;
    atomic_int *down_pending, *combine_pending;

    float *y; /* output of down: [2][slices][rows][section columns]; sections alternate between the two halves */
    /* Only the activations of the format's arithmetic are used. */
    kt_int8_activations int8;
    kt_bf16_activations bf16;
} kt_group;

typedef struct {
    void *c; /* int32 or float32 [KT_MAX_PANELS][KT_MAX_SUMS][32] */
    uint8_t *gemm;
    float *sums; /* [slices][section columns] */
    const float **rows;
    float *weights;
    kt_code_row *place;
} kt_worker_scratch;

typedef struct {
    const ktq_moe *moe;
    const kt_format *gate, *up, *down; /* the same format in int8 arithmetic */
    const kt_arithmetic *arithmetic;
    const ktq_call *call;
    const kt_kernels *kernels;
    int64_t width;               /* columns of the widest slice */
    int64_t first_token, tokens; /* tokens of this pass */
    int64_t rows, buckets, sections, section_columns;
    kt_bucket *bucket;
    kt_pair *pair;     /* [tokens][topk] */
    int groups;
    kt_group *group;
    kt_worker_scratch *scratch;
    /* Outputs of the slices, [slices][tokens][hidden], which the last tasks merge; NULL with one group. */
    float *partial;
    int64_t merge_tasks;
    _Alignas(64) atomic_llong next_merge;
} kt_pass;

/* moe_tasks.c: runs the tasks of `group`, then unclaimed tasks of the other groups, then the merge. */
void kt_run_tasks(void *pass, int group, int worker);

/* moe.c: returns KTQ_OK or an error code. */
int kt_check_call(const ktq_moe *moe, const ktq_call *call);
int64_t kt_widest_slice(const ktq_moe *moe);
/* Runs the passes of a checked call, without the norm of outputs. Call it between kt_pool_enter and kt_pool_leave. */
int kt_run_passes(ktq_pool *pool, const ktq_moe *moe, const ktq_call *call);
/* Sets rows, buckets, bucket (the expert with the most tokens first) and pair, and loads the missing experts among
   them. place: scratch [experts]. */
void kt_sort_tokens(kt_pass *pass, int64_t *place);

static inline int64_t kt_ceil_divide(int64_t n, int64_t size) {
    return (n + size - 1) / size;
}

/* An allocator that cuts blocks off one piece of memory; with base NULL it only adds up their sizes. AddressSanitizer
 * (tests/asan.sh) reports accesses to the gap behind a block, until kt_unpoison_gaps. */
typedef struct {
    uint8_t *base;
    size_t used;
} kt_arena;

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
enum { KT_GAP = 64 };
#else
#define ASAN_POISON_MEMORY_REGION(from, bytes) ((void)(from), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(from, bytes) ((void)(from), (void)(bytes))
enum { KT_GAP = 0 };
#endif

static inline void *kt_allocate(kt_arena *arena, int64_t count, size_t size) {
    size_t bytes = (size_t)count * size, padded = ((bytes + 63) & ~(size_t)63) + KT_GAP;
    uint8_t *block = arena->base ? arena->base + arena->used : NULL;
    if (block) {
        ASAN_UNPOISON_MEMORY_REGION(block, bytes);
        ASAN_POISON_MEMORY_REGION(block + bytes, padded - bytes);
    }
    arena->used += padded;
    return block;
}
static inline void kt_unpoison_gaps(const kt_arena *arena) {
    ASAN_UNPOISON_MEMORY_REGION(arena->base, arena->used);
}
#define KT_ALLOCATE(pointer, count) ((pointer) = kt_allocate(arena, (count), sizeof *(pointer)))

/* What the tasks compute. moe_tasks.c has their order. */
struct kt_arithmetic {
    int64_t a_bytes, h_bytes; /* bytes for each column of a row's activations, before and after gate and up */
    /* Allocates the activations of a group. */
    void (*allocate)(const kt_pass *pass, kt_group *group, kt_arena *arena);
    /* Writes a token of the pass to its row of each of its experts. */
    void (*quantize)(const kt_pass *pass, kt_group *group, int64_t token, const kt_worker_scratch *scratch);
    void (*gate_up)(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch);
    /* NULL: down reads h as gate_up writes it. */
    void (*requantize)(const kt_pass *pass, kt_group *group, const kt_task *task);
    void (*down)(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch);
};

static inline const ktq_expert *kt_get_expert(const kt_pass *pass, const kt_group *group, const kt_task *task) {
    return &pass->moe
                ->expert[group->slice_number[task->slice] * pass->moe->experts + pass->bucket[task->bucket].expert];
}

static inline int64_t kt_get_width(const kt_pass *pass, const kt_group *group, const kt_task *task) {
    return pass->moe->width[group->slice_number[task->slice]];
}

/* Number of projections that a GATE_UP task multiplies: gate and up, or only up. */
static inline int64_t kt_sides(const ktq_moe *moe) {
    return moe->function.ungated ? 1 : 2;
}

/* Factor of an expert's output for a routing weight. */
static inline float kt_output_weight(const ktq_moe *moe, float weight) {
    return moe->function.weights_on_input ? 1 : weight;
}

/* Adds a panel's biases (NULL: none) to rows y[m], `pitch` apart. */
static inline void kt_add_bias(const float *bias, int64_t m, float *y, int64_t pitch) {
    for (int64_t t = 0; bias && t < m; t++)
        for (int64_t r = 0; r < KT_PANEL_ROWS; r++) y[t * pitch + r] += bias[r];
}
static inline const float *kt_bias_at(const float *bias, int64_t column) {
    return bias ? bias + column : NULL;
}

/* The first panel of a DOWN task, counted in the weight. */
static inline int64_t kt_first_panel(const kt_pass *pass, const kt_task *task) {
    return task->section * (pass->section_columns / KT_PANEL_ROWS) + task->first;
}

/* Panel number i of a DOWN task: alternately from its first and second half, for two streams from memory. */
static inline int64_t kt_down_panel(const kt_task *task, int64_t i) {
    return i % 2 ? kt_ceil_divide(task->count, 2) + i / 2 : i / 2;
}

/* The section's rows of a DOWN task's bucket in y. */
static inline float *kt_down_rows(const kt_pass *pass, const kt_group *group, const kt_task *task) {
    int64_t row = (task->section % 2 * group->slices + task->slice) * pass->rows + pass->bucket[task->bucket].first;
    return group->y + row * pass->section_columns;
}

#endif
