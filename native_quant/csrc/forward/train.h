/* The forward and backward of a layer's routed experts for training LoRA: their steps (train.c), the ranges of a step
 * (train_ranges.c), memory (train_memory.c), and products (train_products.c, train_lora.c, train_transpose.c). */
#ifndef KT_TRAIN_H
#define KT_TRAIN_H

#include "moe.h"

enum {
    /* Panels of a range. Their columns of a weight are transposed together; they are whole tiles of INT4. */
    KT_STEP_PANELS = 4,
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

/* What one call of a step computes: rows or panels first .. first + count - 1 of a bucket, or tokens. slice: a NUMA
   slice, or for kt_factor_gradient the factor. */
typedef struct {
    int64_t bucket, slice, first, count;
} kt_range;

/* Rows of activations as int8 codes, block after block in tiles. */
typedef struct {
    int8_t *q;
    float *scale;
    int32_t *sums;
} kt_int8_rows;

typedef struct {
    uint16_t *rows;       /* rows of a factor, or activations after dropout */
    uint16_t *panels;     /* the same, packed */
    uint16_t *transposed; /* [2][KT_STEP_PANELS][32][columns] */
    uint16_t *token_rows; /* [terms * rank][tokens]: operands of a sum over tokens */
    uint16_t *chunk;      /* KT_STEP_PANELS blocks of 32 columns, twice: in stored order, and in rows */
    uint16_t *rounded;
    float *c;            /* [2 * KT_STEP_PANELS][KT_TOKEN_BLOCK][32]; for a sum over tokens [rows][32] */
    float *lora_product; /* [KT_TOKEN_BLOCK][32], or a row */
    float *products;     /* [KT_TOKEN_BLOCK][32], or a row */
    float *derivative;   /* [4][KT_TOKEN_BLOCK][32]: gate, up, and the derivatives of the activation by them */
    int32_t *acc;
    uint8_t *gemm;
} kt_train_scratch;

typedef struct kt_training kt_training;
typedef void kt_step(const kt_training *training, const kt_range *range, const kt_train_scratch *scratch);

struct kt_training {
    kt_pass pass; /* only its formats and routing are used */
    const kt_kernels *kernels;
    const ktq_moe *moe;
    const ktq_call *call;
    const ktq_lora *lora; /* NULL: no LoRA */
    const ktq_activations *saved;
    const ktq_gradients *gradients; /* NULL in the forward */
    int64_t columns;                /* intermediate size: the columns of all slices */
    int64_t offset[KTQ_MAX_SLICES]; /* first column of each slice */
    int64_t width;                  /* columns of the widest slice */
    int64_t largest;                /* rows of the largest bucket */
    int64_t rank_columns;           /* ktq_rank_columns(rank) */
    int64_t section, section_columns;
    float scaling;     /* LoRA's scaling, divided by the fraction that dropout keeps */
    int64_t *row_pair; /* [rows]: index of each row's pair */
    int64_t *block;    /* [buckets]: number of blocks of rows in the buckets before it */
    uint16_t *x;       /* [rows][hidden] */
    /* Codes of x and act. In a backward with transposes, codes of the gradients of down's output, gate and up. */
    kt_int8_rows x8, act8[KTQ_MAX_SLICES], up8[KTQ_MAX_SLICES];
    uint16_t *gradient;                      /* [rows][hidden]: the output's gradient times the router weight */
    uint16_t *gate_gradient, *up_gradient;   /* [rows][columns] */
    uint16_t *rank_gradient[KT_PROJECTIONS]; /* gradients of the products with `a`, laid out as rank_rows */
    float *x_gradient;                       /* [rows][section_columns] */
    kt_range *ranges;
    kt_step *step;
    int64_t end[KTQ_MAX_SLICES]; /* end of each group's ranges */
    struct {
        _Alignas(64) atomic_llong next;
    } group[KTQ_MAX_SLICES];
    kt_train_scratch *scratch;
};

/* Gate, or up where there is no gate. */
static inline int kt_first_projection(const kt_training *t) {
    return t->moe->function.ungated ? KT_PROJECTION_UP : KT_PROJECTION_GATE;
}

static inline int kt_uses_int8(const kt_training *t) {
    return t->pass.gate->arithmetic == &kt_int8_arithmetic;
}

/* Whether the backward multiplies gradients in int8. */
static inline int kt_quantizes_gradients(const kt_training *t) {
    return t->moe->transposed && kt_uses_int8(t);
}

/* Row of rank_rows for a projection: gate, up, or down of a slice. */
static inline uint16_t *kt_rank_row(const kt_training *t, uint16_t *rank_rows, int64_t projection, int64_t row) {
    return rank_rows + (projection * t->pass.rows + row) * 2 * t->rank_columns;
}

/* train_products.c */

static inline const ktq_expert *kt_expert_at(const kt_training *t, int64_t bucket, int64_t slice) {
    return &t->moe->expert[slice * t->moe->experts + t->pass.bucket[bucket].expert];
}

/* The stored weight of a bucket's expert. */
kt_matrix kt_get_matrix(const kt_training *t, int64_t bucket, int64_t slice, int projection);
/* Rounds c[m][32] to BF16, adds the scaled product of LoRA (NULL: no LoRA) and rounds again. The result replaces c, and
   is written to rows of `out` unless that is NULL. */
void kt_round_products(const kt_training *t, int64_t m, float *c, float *lora_product, uint16_t *out, int64_t pitch,
                       const kt_train_scratch *s);
void kt_quantize_block(const kt_training *t, const kt_range *block, const uint16_t *rows, int64_t pitch, int64_t k,
                       const kt_int8_rows *to);
/* Multiplies a block's rows with `count` panels of a weight: c[panel][m][32]. codes: the same rows in int8. */
void kt_multiply_block(const kt_training *t, const kt_range *block, const kt_matrix *w, int64_t first, int64_t count,
                       const uint16_t *rows, int64_t pitch, const kt_int8_rows *codes, float *c,
                       const kt_train_scratch *s);
/* Writes 32 * count columns of a weight, from 32 * first on, as panels of its transpose. Does nothing if the layer has
   packed transposes. */
void kt_transpose_columns(const kt_training *t, int64_t bucket, int64_t slice, int projection, int64_t first,
                          int64_t count, uint16_t *panels, const kt_train_scratch *s);
/* Multiplies a block's rows with these panels, or with the packed transpose. */
void kt_multiply_transposed(const kt_training *t, const kt_range *block, int64_t slice, int projection, int64_t first,
                            int64_t count, const uint16_t *panels, const uint16_t *rows, int64_t pitch,
                            const kt_int8_rows *codes, float *c, const kt_train_scratch *s);
/* Multiplies rows, after dropout, with the factor `a`. column: first column of the slice. */
void kt_project_inputs(const kt_training *t, int projection, int64_t expert, int64_t column, int64_t k,
                       const uint16_t *rows, int64_t pitch, int64_t row, int64_t m, uint16_t *rank_rows,
                       const kt_train_scratch *s);

/* train_ranges.c: each runs a step for all of its ranges. */

void kt_run_blocks(ktq_pool *pool, kt_training *t, kt_step *step);
/* Ranges of `panels` panels for each slice (0: as many as the slice has). A slice's group takes them first. */
void kt_run_panels(ktq_pool *pool, kt_training *t, int64_t slices, int64_t panels, kt_step *step);
void kt_run_tokens(ktq_pool *pool, kt_training *t, kt_step *step);
void kt_run_factors(ktq_pool *pool, kt_training *t);
int64_t kt_max_ranges(const kt_training *t);

/* train_memory.c */

int kt_sort_and_allocate(ktq_pool *pool, kt_training *t);

/* train_lora.c. A rank row has `rank` numbers, each as the sum of two BF16 numbers: 2 * rank_columns columns. */

/* Multiplies rows[m] (pitch) of k columns with columns of a factor, from `first` on: m rank rows. */
void kt_project_to_rank(const kt_training *t, kt_factor factor, int64_t expert, int64_t first, int64_t k,
                        const uint16_t *rows, int64_t pitch, int64_t m, uint16_t *rank_rows,
                        const kt_train_scratch *scratch);
/* Multiplies m rank rows with 32 columns of a factor, from `first` on: c[m][32]. */
void kt_project_from_rank(const kt_training *t, kt_factor factor, int64_t expert, int64_t first,
                          const uint16_t *rank_rows, int64_t m, float *c, const kt_train_scratch *scratch);
/* A step: 32 * count columns of a factor's gradient, from 32 * first on. range->slice is projection * 2 + is_b. */
void kt_factor_gradient(const kt_training *t, const kt_range *range, const kt_train_scratch *scratch);
/* Dropout: sets some of the columns of a row, from `first` on, to 0. values: BF16, or float32 (kt_drop_floats). */
void kt_drop_inputs(const kt_training *t, int projection, int64_t row, int64_t first, int64_t columns,
                    uint16_t *values);
void kt_drop_floats(const kt_training *t, int projection, int64_t row, int64_t first, int64_t columns, float *values);

/* train_transpose.c: writes columns of a weight, from `first` on, as panels of its transpose in BF16, [count][32][n].
   first: a multiple of 128. */
void kt_transpose_panels(const kt_kernels *kernels, const kt_matrix *w, int64_t first, int64_t count, uint16_t *panels,
                         uint16_t *chunk);

/* Multiplies rows a[m] (pitch) with contiguous panels in BF16: c[panel][m][32]. */
static inline void kt_multiply_bf16(const kt_kernels *kernels, const kt_format *format, const void *codes,
                                    const void *scales, int64_t k, int64_t first, int64_t count, const uint16_t *a,
                                    int64_t pitch, int64_t m, float *c, uint8_t *scratch) {
    kt_bf16_panel panel[2 * KT_STEP_PANELS];
    for (int64_t s = 0; s < count; s += 2 * KT_STEP_PANELS, c += 2 * KT_STEP_PANELS * m * KT_PANEL_ROWS) {
        int64_t panels = count - s < 2 * KT_STEP_PANELS ? count - s : 2 * KT_STEP_PANELS;
        for (int64_t i = 0; i < panels; i++) panel[i] = kt_get_bf16_panel(format, codes, scales, k, first + s + i);
        kt_bf16_gemm_fn *gemm = panel[0].integers ? kernels->gemm_int16 : kernels->gemm_bf16;
        gemm(&(kt_bf16_gemm){.m = m,
                             .k = k,
                             .a = a,
                             .a_pitch = pitch,
                             .panels = panels,
                             .panel = panel,
                             .kernels = kernels,
                             .c = c,
                             .c_pitch = m * KT_PANEL_ROWS,
                             .scratch = scratch});
    }
}

#endif
