/* The forward and backward of a layer's routed experts for training LoRA: its steps (train.c), their slices
 * (train_slices.c) and memory (train_memory.c), what they multiply (train_products.c, train_lora.c, train_turn.c). */
#ifndef KT_TRAIN_H
#define KT_TRAIN_H

#include "moe.h"

enum {
    KT_TURNED = 4, /* panels that a task computes: columns of a weight that are turned together, whole tiles of INT4 */
    KT_PROJECTIONS = 3,
};
enum { KT_PROJECTION_GATE, KT_PROJECTION_UP, KT_PROJECTION_DOWN };

typedef struct {
    const kt_format *format;
    const void *codes, *scales;
    int64_t n, k;
} kt_matrix;

/* One of LoRA's factors: a [rank][columns], or b [rows][rank]. */
typedef struct {
    int is_b, projection;
} kt_factor;

/* Rows first .. first + count - 1 of a bucket, or its panels, or tokens. */
typedef struct {
    int64_t bucket, part, first, count;
} kt_slice;

/* int8 codes of rows, block by block in tiles. */
typedef struct {
    int8_t *q;
    float *scale;
    int32_t *sums;
} kt_codes8;

typedef struct {
    uint16_t *rows;   /* a factor or dropped activations in rows */
    uint16_t *panels; /* what is packed */
    uint16_t *turned; /* [2][KT_TURNED][32][columns] */
    uint16_t *low;    /* rows of a sum over tokens: [terms * rank][tokens] */
    uint16_t *chunk;  /* KT_TURNED blocks of 32 columns, as codes lie and in rows */
    uint16_t *rounded;
    float *c;        /* [2 * KT_TURNED][KT_TOKEN_BLOCK][32], or [rows][32] of a sum over tokens */
    float *of_lora;  /* [KT_TOKEN_BLOCK][32], or a row */
    float *products; /* the same */
    int32_t *acc, *zeros;
    uint8_t *gemm;
} kt_train_scratch;

typedef struct kt_training kt_training;
typedef void kt_step(const kt_training *training, const kt_slice *slice, const kt_train_scratch *scratch);

struct kt_training {
    kt_pass pass; /* only its routing is used */
    const kt_kernels *kernels;
    const ktq_moe *moe;
    const ktq_call *call;
    const ktq_lora *lora; /* NULL: none */
    const ktq_kept *kept;
    const ktq_gradients *gradients;          /* NULL: it is the forward */
    int64_t columns, offset[KTQ_MOST_PARTS]; /* of all parts; where a part begins */
    int64_t width, largest, low, section, section_columns;
    float scaling; /* with dropout, what it makes up for, too */
    int64_t *pair_of; /* [rows] */
    int64_t *block;   /* [buckets]: how many blocks of rows come before */
    uint16_t *x;      /* [rows][hidden] */
    /* Codes of x and act; in a backward with transposes, of the gradients of down's output, gate and up. */
    kt_codes8 x8, act8[KTQ_MOST_PARTS], up8[KTQ_MOST_PARTS];
    uint16_t *gradient;         /* [rows][hidden]: times the weight */
    uint16_t *of_gate, *of_up;  /* gradients [rows][columns] */
    uint16_t *of_low[KT_PROJECTIONS]; /* gradients of what `a` gives, as ktq_kept.low */
    float *of_x;                /* [rows][section_columns] */
    kt_slice *slice;
    kt_step *step;
    int64_t end[KTQ_MOST_PARTS]; /* of a group's slices */
    struct {
        _Alignas(64) atomic_llong next;
    } group[KTQ_MOST_PARTS];
    kt_train_scratch *scratch;
};

static inline int kt_in_int8(const kt_training *t) {
    return t->pass.gate->arithmetic == &kt_int8_arithmetic;
}

/* Whether gradients are multiplied in int8. */
static inline int kt_quantizes_gradients(const kt_training *t) {
    return t->moe->transposed && kt_in_int8(t);
}

static inline uint16_t *kt_low_of(const kt_training *t, uint16_t *low, int64_t which, int64_t row) {
    return low + (which * t->pass.rows + row) * 2 * t->low;
}

/* train_products.c */

kt_matrix kt_matrix_of(const kt_training *t, int64_t bucket, int64_t part, int projection);
/* BF16 of c[m][32], of that and the scaled product of LoRA (NULL: none): c, and rows of `out` (NULL: not wanted). */
void kt_finish(const kt_training *t, int64_t m, float *c, float *of_lora, uint16_t *out, int64_t pitch,
               const kt_train_scratch *s);
void kt_quantize_block(const kt_training *t, const kt_slice *block, const uint16_t *rows, int64_t pitch, int64_t k,
                       const kt_codes8 *to);
/* A block's rows times some panels of a weight: c[panel][m][32]. codes: the same rows in int8. */
void kt_multiply_block(const kt_training *t, const kt_slice *block, const kt_matrix *w, int64_t first, int64_t count,
                       const uint16_t *rows, int64_t pitch, const kt_codes8 *codes, float *c,
                       const kt_train_scratch *s);
/* Columns from 32 * first on of a weight, as panels of its transpose, where nothing has packed that. */
void kt_turn_columns(const kt_training *t, int64_t bucket, int64_t part, int projection, int64_t first, int64_t count,
                     uint16_t *panels, const kt_train_scratch *s);
/* A block's rows times them, or times those that were packed. */
void kt_multiply_turned(const kt_training *t, const kt_slice *block, int64_t part, int projection, int64_t first,
                        int64_t count, const uint16_t *panels, const uint16_t *rows, int64_t pitch,
                        const kt_codes8 *codes, float *c, const kt_train_scratch *s);
/* Rows times the factor `a`, after dropout. column: where a part begins in rows. */
void kt_narrow_inputs(const kt_training *t, int projection, int64_t expert, int64_t column, int64_t k,
                      const uint16_t *rows, int64_t pitch, int64_t row, int64_t m, uint16_t *low,
                      const kt_train_scratch *s);

/* train_slices.c: run a step for all of its slices. */

void kt_run_blocks(ktq_pool *pool, kt_training *t, kt_step *step);
/* Panels of each part, those of a part by its group first: `panels` of them, or 0: as many as the part has. */
void kt_run_panels(ktq_pool *pool, kt_training *t, int64_t parts, int64_t panels, kt_step *step);
void kt_run_tokens(ktq_pool *pool, kt_training *t, kt_step *step);
void kt_run_factors(ktq_pool *pool, kt_training *t);
int64_t kt_most_slices(const kt_training *t);

/* train_memory.c */

int kt_sort_and_allocate(ktq_pool *pool, kt_training *t);

/* train_lora.c. Low rows are pairs of BF16 numbers that add up to one: 2 * low columns. */

/* rows[m] (pitch) of k columns times a factor's columns from `first` on: m low rows. */
void kt_narrow(const kt_training *t, kt_factor factor, int64_t expert, int64_t first, int64_t k, const uint16_t *rows,
               int64_t pitch, int64_t m, uint16_t *low, const kt_train_scratch *scratch);
/* m low rows times 32 columns of a factor from `first` on: c[m][32]. */
void kt_widen(const kt_training *t, kt_factor factor, int64_t expert, int64_t first, const uint16_t *low, int64_t m,
              float *c, const kt_train_scratch *scratch);
/* A factor's gradient: columns from 32 * slice->first on, of part `projection * 2 + is_b`. */
void kt_factor_gradient(const kt_training *t, const kt_slice *slice, const kt_train_scratch *scratch);
/* Leaves out some of the columns first .. of a row, BF16 or (floats) float32. */
void kt_drop(const kt_training *t, int projection, int64_t row, int64_t first, int64_t columns, uint16_t *values);
void kt_drop_floats(const kt_training *t, int projection, int64_t row, int64_t first, int64_t columns, float *values);

/* train_turn.c: columns first .. of a weight as panels of BF16 of its transpose, [count][32][n]. first: a multiple of
   128. */
void kt_turn(const kt_kernels *kernels, const kt_matrix *w, int64_t first, int64_t count, uint16_t *panels,
             uint16_t *chunk);

/* Rows a[m] (pitch) times contiguous panels of BF16: c[panel][m][32]. */
static inline void kt_multiply_bf16(const kt_kernels *kernels, const kt_format *format, const void *codes,
                                    const void *scales, int64_t k, int64_t first, int64_t count, const uint16_t *a,
                                    int64_t pitch, int64_t m, float *c, uint8_t *scratch) {
    kt_bf16_panel panel[2 * KT_TURNED];
    for (int64_t s = 0; s < count; s += 2 * KT_TURNED, c += 2 * KT_TURNED * m * KT_PANEL_ROWS) {
        int64_t some = count - s < 2 * KT_TURNED ? count - s : 2 * KT_TURNED;
        for (int64_t i = 0; i < some; i++) panel[i] = kt_bf16_panel_of(format, codes, scales, k, first + s + i);
        kt_bf16_gemm_fn *gemm = panel[0].integers ? kernels->gemm_int16 : kernels->gemm_bf16;
        gemm(&(kt_bf16_gemm){.m = m,
                             .k = k,
                             .a = a,
                             .a_pitch = pitch,
                             .panels = some,
                             .panel = panel,
                             .kernels = kernels,
                             .c = c,
                             .c_pitch = m * KT_PANEL_ROWS,
                             .scratch = scratch});
    }
}

#endif
