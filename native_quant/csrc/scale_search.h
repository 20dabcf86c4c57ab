/* Scales of least squared error: what the loop (convert/scale_search.c) and its kernels share. NUMERICS.md, section 2b.
 */
#ifndef KT_SCALE_SEARCH_H
#define KT_SCALE_SEARCH_H

#include <stdint.h>

enum { KT_CANDIDATES = 16, KT_SUM_LANES = 16 };

/* Adding it to a float32 below 2^22, which is not negative, rounds to nearest even; the integer is in the low bits. */
#define KT_ROUND 0x1p23f

/* A row of k BF16 values, all finite (any alignment; k: a multiple of 64), and the candidates. reciprocal: what |x| is
   multiplied by to be counted in steps of the largest candidate. ratios[KT_CANDIDATES]: a step of a candidate is so
   many times smaller. largest: code. weights: of each column; NULL: all are 1. units[k]: for the kernels, on a boundary
   of 64 bytes. */
typedef struct {
    const uint8_t *row;
    int64_t k;
    float reciprocal, largest;
    const float *ratios, *weights;
    float *units;
} kt_scale_search;

/* Writes units, and the sums of units * codes and of codes * codes of each candidate. */
typedef void kt_scale_sums_fn(const kt_scale_search *search, float *products, float *squares);

/* From units, the codes that a ratio gives: k bytes. */
typedef void kt_scale_codes_fn(const kt_scale_search *search, float ratio, int8_t *codes);

#endif
