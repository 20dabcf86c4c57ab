/* One forward of a layer's routed experts, cut into tasks (moe.c plans, moe_tasks.c works). */
#ifndef KT_MOE_H
#define KT_MOE_H

#include <stdatomic.h>
#include <stddef.h>

#include "formats.h"
#include "system/pool.h"

enum {
    KT_TOKEN_BLOCK = 256, /* BF16 tokens of an expert that go through a kernel at a time: they stay in L2 */
    KT_MAX_PANELS = 16,   /* panels that a task multiplies at a time */
    KT_MOST_SUMS = 2 * KT_MOST_TOKENS + KT_MOST_TILE_ROWS, /* rows of sums: each may have a remainder; whole tiles */
    KT_ROW_BLOCK = 16,    /* rows that are quantized, or tokens that are combined, by one task */
    /* A bucket of at most this many rows is requantized by the last of its GATE_UP tasks, which has some of h at hand;
       the rows of a larger one are shared out. That saves 1 to 2 % of a forward of the Qwen3-30B-A3B shape. */
    KT_REQUANTIZED_AT_ONCE = 64,
};

enum { KT_QUANTIZE, KT_GATE_UP, KT_REQUANTIZE, KT_DOWN, KT_COMBINE };

/* The unit that a thread claims. It waits only for tasks that were claimed before it, so the oldest unfinished one
 * never waits. */
typedef struct {
    int kind, part;      /* part: counted among those of the group */
    int64_t bucket;      /* GATE_UP, REQUANTIZE, DOWN */
    int64_t section;      /* DOWN, COMBINE */
    int64_t first, count; /* panels (GATE_UP: of gate and of up; DOWN: of the section), rows, or tokens */
} kt_task;

/* The tokens that go to one expert: rows first .. first + m - 1 of everything that has a row per (token, expert). */
typedef struct {
    int64_t expert, first, m;
} kt_bucket;

/* A pair of a token and one of its experts. */
typedef struct {
    int64_t row; /* of everything that has a row for each of them; -1: none */
    int64_t bucket;
} kt_pair;

/* The activations of int8 arithmetic. The codes of a bucket's rows are in tiles (kt_tiling), for which it has room. */
typedef struct {
    int8_t *a; /* hidden codes of each row's token */
    float *a_scale; /* [rows] */
    int32_t *a_sums;
    double *coarse; /* [rows]: the mean square of h's codes below which they need a remainder */
    float *h; /* [parts][rows][width]: silu(gate) * up */
    /* By part, room for 2 m rows of a bucket and for whole tiles: block by block of tokens that a call of the kernel
       gets, the rows and then the remainders of the coarse ones. */
    int8_t *hq;
    float *h_scale;
    int32_t *h_sums;
    int32_t *rest_of; /* the row of a row's remainder, counted in the block; 0: it has none */
    atomic_int *remainders; /* [parts][blocks] */
} kt_int8_activations;

/* Those of BF16 arithmetic. */
typedef struct {
    uint16_t *a; /* [rows][hidden]: of each row's token */
    /* [parts][terms of down * rows][width of the part], parts as far apart as the widest: silu(gate) * up. Of each
       block of tokens the first terms come before the second ones. */
    uint16_t *h;
    float *a_sums, *h_sums; /* of each KT_SUM_COLUMNS columns; NULL where no weight has least values */
} kt_bf16_activations;

/* The work of one group of threads (NUMA node): all tasks of its parts. */
typedef struct {
    int64_t parts, *part;
    kt_task *task;
    int64_t tasks, threads;
    _Alignas(64) atomic_llong next;
    _Alignas(64) atomic_int to_quantize;
    atomic_int *gate_up_left, *requantize_left; /* [parts][buckets]; requantize_left: NULL where nothing is */
    atomic_int *down_left, *combine_left;       /* [sections] */

    float *y; /* [2][parts][rows][section columns]: the output of down; sections alternate */
    kt_int8_activations int8; /* one of the two, as the format's arithmetic wants */
    kt_bf16_activations bf16;
} kt_group;

typedef struct {
    void *c; /* int32 or float32 [KT_MAX_PANELS][KT_MOST_SUMS][32] */
    uint8_t *gemm;
    float *sums; /* [parts][section columns] */
    const float **rows;
    float *weights;
    kt_code_row *place;
} kt_worker_scratch;

typedef struct {
    const ktq_moe *moe;
    const kt_format *gate, *up, *down; /* in int8 arithmetic, one */
    const kt_arithmetic *arithmetic;
    const ktq_call *call;
    const kt_kernels *kernels;
    int64_t width; /* of the widest part */
    int64_t first_token, tokens; /* this pass */
    int64_t rows, buckets, sections, section_columns;
    kt_bucket *bucket;
    kt_pair *pair;     /* [tokens][topk] */
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

/* moe.c: KTQ_OK, or what is wrong. */
int kt_check_call(const ktq_moe *moe, const ktq_call *call);
int64_t kt_widest_part(const ktq_moe *moe);
/* Fills rows, buckets, bucket, the most wanted expert first, and pair. place: [experts]. */
void kt_sort_tokens(kt_pass *pass, int64_t *place);

static inline int64_t kt_blocks(int64_t n, int64_t size) {
    return (n + size - 1) / size;
}

/* Hands out memory block by block; with base NULL it only counts. AddressSanitizer (tests/asan.sh) reports whatever
 * touches the gap behind a block, until kt_open_gaps. */
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

static inline void *kt_take(kt_arena *arena, int64_t count, size_t size) {
    size_t bytes = (size_t)count * size, padded = ((bytes + 63) & ~(size_t)63) + KT_GAP;
    uint8_t *block = arena->base ? arena->base + arena->used : NULL;
    if (block) {
        ASAN_UNPOISON_MEMORY_REGION(block, bytes);
        ASAN_POISON_MEMORY_REGION(block + bytes, padded - bytes);
    }
    arena->used += padded;
    return block;
}
static inline void kt_open_gaps(const kt_arena *arena) {
    ASAN_UNPOISON_MEMORY_REGION(arena->base, arena->used);
}
#define KT_TAKE(pointer, count) ((pointer) = kt_take(arena, (count), sizeof *(pointer)))

/* The arithmetic of the tasks. moe_tasks.c waits and counts. */
struct kt_arithmetic {
    int64_t a_bytes, h_bytes; /* memory for a column of a row's activations, before and after gate and up */
    /* Memory for a group's rows. */
    void (*allocate)(const kt_pass *pass, kt_group *group, kt_arena *arena);
    /* A token of the pass, to the row of every expert that wants it. */
    void (*quantize)(const kt_pass *pass, kt_group *group, int64_t token, const kt_worker_scratch *scratch);
    void (*gate_up)(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch);
    /* NULL: h is ready as gate_up leaves it. */
    void (*requantize)(const kt_pass *pass, kt_group *group, const kt_task *task);
    void (*down)(const kt_pass *pass, kt_group *group, const kt_task *task, const kt_worker_scratch *scratch);
};

static inline const ktq_expert *kt_expert_of(const kt_pass *pass, const kt_group *group, const kt_task *task) {
    return &pass->moe->expert[group->part[task->part] * pass->moe->experts + pass->bucket[task->bucket].expert];
}

static inline int64_t kt_width_of(const kt_pass *pass, const kt_group *group, const kt_task *task) {
    return pass->moe->width[group->part[task->part]];
}

/* The first panel of a DOWN task, counted in the weight. */
static inline int64_t kt_first_panel(const kt_pass *pass, const kt_task *task) {
    return task->section * (pass->section_columns / KT_PANEL_ROWS) + task->first;
}

/* The order of a DOWN task's panels: one from its first half, one from its second: two streams from memory. */
static inline int64_t kt_down_panel(const kt_task *task, int64_t i) {
    return i % 2 ? kt_blocks(task->count, 2) + i / 2 : i / 2;
}

/* The section's rows of a DOWN task's bucket in y. */
static inline float *kt_down_rows(const kt_pass *pass, const kt_group *group, const kt_task *task) {
    int64_t row = (task->section % 2 * group->parts + task->part) * pass->rows + pass->bucket[task->bucket].first;
    return group->y + row * pass->section_columns;
}

#endif
