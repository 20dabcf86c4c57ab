/* The loops of a vector kernel for products of BF16 (gemm_bf16_steps.c), and the steps that each instruction set
 * defines.
 *
 * - few tokens (at most `tokens`): memory is the limit. Two panels are read in turn, chunk by chunk, and each chunk is
 *   multiplied while it is in L1; or codes are multiplied as they are read (`few`).
 * - many tokens: arithmetic is the limit. For each KT_CHUNK_COLUMNS columns, the chunk of each panel is made once, and
 *   multiplied with one block of tokens after the other. The activations stay in L2. */
#ifndef KT_GEMM_BF16_STEPS_H
#define KT_GEMM_BF16_STEPS_H

#include "kernels.h"
#include "reading.h"

enum {
    KT_FEW_TOKENS = 6,        /* most tokens of `few` */
    KT_CODES_AHEAD = 6656,    /* bytes from a code that `few` reads to those that it prefetches into L2 */
    KT_IN_ORDER_COLUMNS = 64, /* columns of BF16 in 4 KiB, which `few` reads at a time of each of two panels */
};

/* Where codes are prefetched into L1 with an L1 of 48 KiB or more: the next lines of two panels in turn. */
typedef struct {
    const uint8_t *lines[2];
} kt_ahead;

/* Copies a token's activations, at most KT_CHUNK_COLUMNS, in the form that `block` reads. */
typedef void kt_bf16_copy_fn(const uint16_t *a, int64_t columns, void *out);
/* Adds to c[token * 32 + row] the scaled products of a chunk with the copied activations of some tokens. The scales of
   the first KT_SUM_COLUMNS columns are scale[32]; those of the next columns are `scale_step` floats further. Meanwhile
   prefetches `step` bytes for each two columns; `few`: from `ahead`. sum_columns: as in kt_bf16_panel. */
typedef struct {
    int64_t tokens;
    const uint8_t *chunk;
    int64_t columns, sum_columns;
    const float *scale;
    int64_t scale_step;
    const void *a;
    float *c;
    const uint8_t *prefetch;
    int64_t step;
    kt_ahead ahead;
} kt_bf16_block;
typedef void kt_bf16_block_fn(const kt_bf16_block *work);

typedef struct {
    int64_t tokens;     /* most tokens of a block */
    int integers;       /* 1: chunks are int16; 0: BF16 */
    int64_t item_bytes; /* bytes of an activation that `copy` writes */
    int64_t row_bytes;  /* bytes between the activations of two tokens */
    kt_bf16_copy_fn *copy;
    kt_bf16_block_fn *block;
    int64_t few_columns; /* columns that few tokens read at a time of codes that are chunks */
    /* [coding][tokens - 1]: as `block`, but reads codes instead of a chunk, in the order of their bytes, and decodes
       them in registers. NULL: codes must become a chunk. */
    kt_bf16_block_fn *few[KT_CODINGS][KT_FEW_TOKENS];
} kt_bf16_steps;

void kt_clear_bf16_sums(const kt_bf16_gemm *job, int64_t s);

/* Subtracts the least values of KTQ_K_COLUMNS columns of panel s, from `first` on, times the sums of the activations of
   some tokens. The products of these columns are added after that. least: scratch, as many floats. */
void kt_subtract_least(const kt_bf16_gemm *job, int64_t s, int64_t first, int64_t token, int64_t tokens, float *least);

/* Columns of a chunk, such that the chunks of all terms fit into the space of one. */
static inline int64_t kt_chunk_columns(const kt_bf16_panel *panel) {
    return KT_CHUNK_COLUMNS / panel->terms;
}

/* Prefetches the codes some bytes further, with an L1 of 32 KiB: into L2, and no BF16, for which the processor's own
   prefetching is better (Zen 4: up to 1.5 times as fast as prefetching into L1). Multiples of 4 KiB are slower (Zen 4:
   1.2 times as long). */
static inline __attribute__((always_inline)) void kt_fetch_codes(int coding, const uint8_t *codes, int64_t bytes) {
    for (int64_t i = 0; coding != KT_BF16_CODES && i < bytes; i += 64)
        __builtin_prefetch(codes + KT_CODES_AHEAD + i, 0, 2);
}

/* What is prefetched while some columns of panel s, from `first` on, are multiplied, and then as many of the other
   panel that is read in turn with it: each time half of the next codes of both. Memory is faster if two pages are read
   at once (Emerald Rapids: 0.86 to 0.97 of the time of one panel after the other). */
kt_ahead kt_find_ahead(const kt_bf16_gemm *job, int64_t s, int64_t first, int64_t columns);

/* Prefetches as many bytes as are multiplied, `at` bytes after the first code of these columns. far: also prefetches
   into L2 what is as far behind them, which helps if products take much less time than reads (Emerald Rapids: 0.91 to
   0.97 of the time with BF16, 0.95 with one token of Q4_K; nothing with FP8). */
static inline __attribute__((always_inline)) void kt_fetch_in_turn(int far, kt_ahead ahead, int64_t at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 128)
        for (int p = 0; p < 2; p++) {
            const uint8_t *line = ahead.lines[p] + (uint64_t)(at + i) / 2;
            __builtin_prefetch(line);
            if (far) __builtin_prefetch(line + KT_CHUNK_AHEAD, 0, 2);
        }
}

void kt_gemm_bf16_in_steps(const kt_bf16_gemm *job, const kt_bf16_steps *steps);

#endif
