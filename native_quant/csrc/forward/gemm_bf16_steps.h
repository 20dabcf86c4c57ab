/* The order of the work of a vector kernel for products of BF16 (gemm_bf16_steps.c), and the steps that an instruction
 * set brings.
 *
 * - few tokens (at most `tokens`): memory is the limit. Two panels are read in turn, a chunk at a time, which is
 *   multiplied while it is in L1.
 * - many: arithmetic is the limit. The chunks of all panels for KT_CHUNK_COLUMNS columns come one after the other; each
 *   is made once, and multiplied by one block of tokens after the other. Their activations stay in L2. */
#ifndef KT_GEMM_BF16_STEPS_H
#define KT_GEMM_BF16_STEPS_H

#include "kernels.h"

/* One token's activations, KT_CHUNK_COLUMNS at most, in the form that `block` reads. */
typedef void kt_bf16_copy_fn(const uint16_t *a, int64_t columns, void *out);
/* Adds to c[token * 32 + row] the products of a chunk with the activations of some tokens, as they were copied, scaled
   by scale[32], and `scale_step` floats further for each further KT_SUM_COLUMNS columns. Meanwhile prefetches `step`
   bytes from `ahead` on for each two columns. sum_columns: as in kt_bf16_panel. */
typedef struct {
    int64_t tokens;
    const uint8_t *chunk;
    int64_t columns, sum_columns;
    const float *scale;
    int64_t scale_step;
    const void *a;
    float *c;
    const uint8_t *ahead;
    int64_t step;
} kt_bf16_block;
typedef void kt_bf16_block_fn(const kt_bf16_block *work);

typedef struct {
    int64_t tokens;                /* of a block, at most */
    int integers;                  /* 1: chunks are of int16, not of BF16 */
    int64_t item_bytes, row_bytes; /* of an activation as `copy` writes it; from token to token */
    kt_bf16_copy_fn *copy;
    kt_bf16_block_fn *block;
} kt_bf16_steps;

/* The sums of panel s before any product is added: what its least values take away. least: KT_CHUNK_COLUMNS floats on
   a boundary of 64 bytes. */
void kt_begin_bf16_sums(const kt_bf16_gemm *job, int64_t s, float *least);

/* Columns of a chunk that is made at a time: the chunks of all terms fit into the space of one. */
static inline int64_t kt_chunk_columns(const kt_bf16_panel *panel) {
    return KT_CHUNK_COLUMNS / panel->terms;
}

void kt_gemm_bf16_in_steps(const kt_bf16_gemm *job, const kt_bf16_steps *steps);

#endif
