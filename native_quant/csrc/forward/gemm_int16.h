/* Activations as int16 (numerics.md, section 5b), for products with chunks of int16. */
#ifndef KT_GEMM_INT16_H
#define KT_GEMM_INT16_H

#include "bf16.h"
#include "gemm_bf16_steps.h"

enum {
    KT_INT16_BITS = 14, /* of the largest code: with KT_SUM_COLUMNS weights of at most 4096 a sum fits into int32 */
    KT_LEAST_EXPONENT = KT_INT16_BITS, /* biased: from here on both powers of two are normal numbers */
    KT_CHUNK_SUMS = KT_CHUNK_COLUMNS / KT_SUM_COLUMNS,
};

/* A token's activations for the columns of a chunk: integers, of which those of KT_SUM_COLUMNS columns have a unit. */
typedef struct {
    int16_t a[KT_CHUNK_COLUMNS];
    float unit[KT_CHUNK_SUMS];
} kt_int16_row;

/* The unit of activations of which `most`, a BF16 without its sign, is the largest: NaN where that is no number. */
static inline float kt_int16_unit(uint32_t most) {
    uint32_t exponent = most >> 7;
    if (exponent == 255) return kt_float(KT_BF16_NAN << 16);
    return kt_float(((exponent < KT_LEAST_EXPONENT ? KT_LEAST_EXPONENT : exponent) - (KT_INT16_BITS - 1)) << 23);
}

/* 1 by the unit; 0 where that is NaN. */
static inline float kt_int16_reciprocal(float unit) {
    return unit == unit ? kt_float((254u << 23) - kt_bits(unit)) : 0;
}

#endif
