/* Activations as int16 (numerics.md, section 5b), for products with chunks of int16. */
#ifndef KT_GEMM_INT16_H
#define KT_GEMM_INT16_H

#include "bf16.h"
#include "gemm_bf16_steps.h"

enum {
    KT_INT16_BITS = 14, /* bits of the largest code: sums with KT_SUM_COLUMNS weights up to 4096 fit into int32 */
    KT_LEAST_EXPONENT = KT_INT16_BITS, /* least biased exponent for which unit and reciprocal are normal numbers */
    KT_CHUNK_SUMS = KT_CHUNK_COLUMNS / KT_SUM_COLUMNS,
};

/* A token's activations for the columns of a chunk: integers with a unit for each KT_SUM_COLUMNS columns. */
typedef struct {
    int16_t a[KT_CHUNK_COLUMNS];
    float unit[KT_CHUNK_SUMS];
} kt_int16_row;

/* Returns the unit of activations with the largest magnitude `most` (BF16 bits without sign); NaN if it is not
 * finite. */
static inline float kt_int16_unit(uint32_t most) {
    uint32_t exponent = most >> 7;
    if (exponent == 255) return kt_float(KT_BF16_NAN << 16);
    return kt_float(((exponent < KT_LEAST_EXPONENT ? KT_LEAST_EXPONENT : exponent) - (KT_INT16_BITS - 1)) << 23);
}

/* Returns 1 / unit; 0 if unit is NaN. */
static inline float kt_int16_reciprocal(float unit) {
    return unit == unit ? kt_float((254u << 23) - kt_bits(unit)) : 0;
}

#endif
