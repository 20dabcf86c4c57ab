/* Scales of least squared error: what the loops (convert/scale_search.c, convert/group_search.c) and their kernels
 * share. numerics.md, sections 2b, 2d and 2e. */
#ifndef KT_SCALE_SEARCH_H
#define KT_SCALE_SEARCH_H

#include <stdint.h>

#include "bf16.h"

/* KT_TOGETHER: vectors that are multiplied with second moments at a time. */
enum { KT_CANDIDATES = 16, KT_SUM_LANES = 16, KT_SEARCHED_GROUP = 32, KT_TOGETHER = 4 };
/* Rows that are searched at a time with second moments, and rows of those that lie in cache meanwhile. */
enum { KT_SEARCHED_ROWS = 32, KT_SEARCHED_DEPTH = 512 };

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

/* The codes of a grid: integers least..most, all of them (precision 0), or those of so many significant bits. */
typedef struct {
    int least, most, precision;
} kt_code_range;

/* A group of KT_SEARCHED_GROUP BF16 values, all finite (any alignment), and `count` candidates for its scale, as they
   are for values that are multiplied by unit. weights: of each column, or with moments[32][32], as kt_moments_part
   gives them, what the products with them begin with. */
typedef struct {
    const uint8_t *values;
    float unit;
    const float *weights, *moments;
    kt_code_range codes;
    int count;
    float scales[KT_CANDIDATES], reciprocals[KT_CANDIDATES];
} kt_group_search;

/* Of each candidate, the lanes of the sum of squared errors, KT_SUM_LANES, and the codes, KT_SEARCHED_GROUP. Weighted
   (group_errors), or in the metric of second moments (group_forms), for a count that is a multiple of 4. */
typedef void kt_group_errors_fn(const kt_group_search *search, float *lanes, int8_t *codes);

/* sums[v][l] += vectors[i][v] * panel[i][l], i = 0 .. count-1 in that order: v of KT_TOGETHER, l of KT_SUM_LANES. */
typedef void kt_outer_sums_fn(int64_t count, const float *vectors, const float *panel, float *sums);

/* Second moments: a symmetric matrix, whose rows begin `stride` floats apart. unit: what they are
   multiplied by. */
typedef struct {
    const float *values;
    int64_t stride;
    float unit;
} kt_moments;

/* Those of k columns; unit: the power of two that brings the largest of their diagonal to 1 .. 2, or 0
   where that is 0. */
static inline kt_moments kt_moments_of(const float *values, int64_t stride, int64_t k) {
    kt_moments moments = {values, stride, 0.0f};
    float largest = 0.0f;
    for (int64_t i = 0; i < k; i++) {
        float own = moments.values[i * stride + i];
        largest = own > largest ? own : largest;
    }
    int exponent = (int)(kt_bits(largest) >> 23);
    exponent = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
    if (largest != 0.0f) moments.unit = kt_float((uint32_t)(254 - exponent) << 23);
    return moments;
}

/* Rows first .. first+count-1 of `width` columns from `column` on, one after the other, so that x times them times xT
   is that of the whole matrix: twice the moments above the diagonal, 0 below it. */
static inline void kt_moments_part(const kt_moments *moments, int64_t first, int64_t count, int64_t column,
                                   int64_t width, float *part) {
    const float twice = 2.0f * moments->unit;
    for (int64_t i = first; i < first + count; i++, part += width) {
        const float *row = moments->values + i * moments->stride + column;
        for (int64_t c = 0; c < width; c++)
            part[c] = i < column + c ? row[c] * twice : i == column + c ? row[c] * moments->unit : 0.0f;
    }
}

/* The sum of the lanes, which are overwritten: the upper half is added to the lower one until one is left. */
static inline float kt_add_lanes(float *lanes) {
    for (int half = KT_SUM_LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

#endif
