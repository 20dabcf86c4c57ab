/* Products of integers: activations of 14 bits and a sign, or of 8 bits (numerics.md, section 5b), exact in int32.
 *
 * - many tokens: codes become chunks of int16, for the loops of gemm_bf16_steps.h
 * - few tokens: codes are decoded in registers (gemm_int16_few.c). Codes of 4 to 6 bits become bytes, activations two
 *   bytes each, 128 * h + l: instructions that multiply bytes add up the products with h and those with l. Or both
 *   become int16, where that is faster
 * - activations of 8 bits: as for few tokens, with one byte each */
#ifndef KT_GEMM_INT16_H
#define KT_GEMM_INT16_H

#include "bf16.h"
#include "gemm_bf16_steps.h"

enum {
    KT_INT16_BITS = 14, /* bits of the largest code: sums with KT_SUM_COLUMNS weights up to 4096 fit into int32 */
    KT_LEAST_EXPONENT = KT_INT16_BITS, /* least biased exponent for which unit and reciprocal are normal numbers */
    KT_GREATEST_EXPONENT = 127 + 117, /* with more, sums in float32 could overflow (gemm_int16_amx.c) */
    KT_CHUNK_SUMS = KT_CHUNK_COLUMNS / KT_SUM_COLUMNS,
    KT_K_GROUPS = KTQ_K_COLUMNS / KT_SUM_COLUMNS,
};

/* A token's activations for the columns of a chunk: integers with a unit for each KT_SUM_COLUMNS columns. */
typedef struct {
    int16_t a[KT_CHUNK_COLUMNS];
    float unit[KT_CHUNK_SUMS];
} kt_int16_row;

/* KT_SUM_COLUMNS activations of a token.
     a      with codes of 8 bits, and if int16 is faster: int16. Otherwise: for each 8 columns, h of columns 0 4 1 5 and
            their l, then h of columns 2 6 3 7 and their l; h is -128..127, l -63..64. Activations of 8 bits: without l
     start  -offset * (sum of the activations), where the sum of products begins; with factors: of the first and of the
            last 16 columns
     unit   their unit
     sum    the sum of the activations before they became integers, if the weights have least values */
typedef struct {
    uint8_t a[2 * KT_SUM_COLUMNS];
    int32_t start[2];
    float unit, sum;
} kt_int16_columns;

/* Converts a token's activations for the weights of a panel. columns: a multiple of KT_SUM_COLUMNS. */
typedef void kt_int16_convert_fn(const kt_bf16_panel *panel, const uint16_t *a, int64_t columns,
                                 kt_int16_columns *out);

/* Adds to c[token * 32 + row] the scaled products of some columns of a panel with the activations of some tokens, which
   are `pitch` structs apart. scale: [columns / KT_SUM_COLUMNS][32]; Q4_K, Q5_K and Q6_K: not read, `scales` is. */
typedef struct {
    int64_t tokens, columns;       /* columns of Q4_K, Q5_K and Q6_K: a multiple of KTQ_K_COLUMNS */
    const uint8_t *codes, *scales; /* of the first column */
    const uint8_t *values;         /* as in kt_integers */
    const float *scale;
    const kt_int16_columns *a;
    int64_t pitch;
    float *c;
    kt_ahead ahead;
} kt_int16_block;
typedef void kt_int16_block_fn(const kt_int16_block *work);

typedef struct {
    int64_t tokens;          /* most tokens of a block */
    int64_t unit_columns[3]; /* columns of a panel that are read at a time, of codes of up to 5, of 6 and of 8 bits */
    kt_int16_convert_fn *convert;
    /* [tokens - 1] of codes that are signed nibbles, unsigned ones, ones with values, and of 5, 6 and 8 bits */
    kt_int16_block_fn *const *signed_4, *const *unsigned_4, *const *values_4, *const *bits_5, *const *bits_6,
        *const *bits_8;
} kt_int16_few;

/* Runs a job whose panels have the same integers. */
void kt_multiply_few_integers(const kt_bf16_gemm *job, const kt_int16_few *few);

/* Whether a job rounds activations to 8 bits. Its panels have the same codes. */
static inline int kt_has_int8(const kt_bf16_gemm *job) {
    return job->int8 && job->panel->bits < 8;
}

/* Returns the unit of 8 bits of activations with the largest magnitude `most` (BF16 bits without sign); NaN if it is
 * not finite. */
static inline float kt_int8_unit(uint32_t most) {
    return most >= KT_BF16_INFINITY ? kt_float(KT_BF16_NAN << 16) : kt_float(most << 16) * (1 / 127.0f);
}

/* Returns 1 / unit; 0 if unit is 0 or NaN. */
static inline float kt_int8_reciprocal(float unit) {
    return unit > 0 ? 1 / unit : 0;
}

/* Returns the unit of activations with the largest magnitude `most` (BF16 bits without sign); NaN if that is 2^118 or
 * more. */
static inline float kt_int16_unit(uint32_t most) {
    uint32_t exponent = most >> 7;
    if (exponent > KT_GREATEST_EXPONENT) return kt_float(KT_BF16_NAN << 16);
    return kt_float(((exponent < KT_LEAST_EXPONENT ? KT_LEAST_EXPONENT : exponent) - (KT_INT16_BITS - 1)) << 23);
}

/* Returns 1 / unit; 0 if unit is NaN. */
static inline float kt_int16_reciprocal(float unit) {
    return unit == unit ? kt_float((254u << 23) - kt_bits(unit)) : 0;
}

#endif
