/* Search for scales of least squared error (numerics.md, sections 2b, 2d and 2e): types shared by the loops
 * (convert/scale_search.c, convert/group_search.c) and their kernels. */
#ifndef KT_SCALE_SEARCH_H
#define KT_SCALE_SEARCH_H

#include <stdint.h>

#include "bf16.h"

enum {
    KT_CANDIDATES = 16,
    KT_SUM_LANES = 16,
    KT_SEARCHED_GROUP = 32,  /* columns of a group */
    KT_TOGETHER = 4,         /* vectors that are multiplied with second moments at a time */
    KT_SEARCHED_ROWS = 32,   /* rows that are searched at a time with second moments */
    KT_SEARCHED_DEPTH = 512, /* rows of second moments that stay in cache meanwhile */
};

/* Adding it to a float32 from 0 to 2^22 rounds to nearest even, and leaves the integer in the low bits. */
#define KT_ROUND 0x1p23f

/* A row of k finite BF16 values (any alignment; k: a multiple of 64), and the candidates for its scale.
     reciprocal             1 / the scale of the largest candidate, times a unit: |x| * reciprocal counts its steps
     ratios[KT_CANDIDATES]  the scale of the largest candidate divided by that of each candidate
     largest                the largest code
     weights[k]             a weight of each column; NULL: all are 1
     units[k]               scratch of the kernels, on a boundary of 64 bytes */
typedef struct {
    const uint8_t *row;
    int64_t k;
    float reciprocal, largest;
    const float *ratios, *weights;
    float *units;
} kt_scale_search;

/* Writes units and, for each candidate, the sums of units * codes and of codes * codes. */
typedef void kt_scale_sums_fn(const kt_scale_search *search, float *products, float *squares);

/* Writes the codes of a candidate, k bytes, from units. */
typedef void kt_scale_codes_fn(const kt_scale_search *search, float ratio, int8_t *codes);

/* The codes of a grid: all integers least..most (precision 0), or those with at most `precision` significant bits. */
typedef struct {
    int least, most, precision;
} kt_code_range;

/* A group of KT_SEARCHED_GROUP finite BF16 values (any alignment), and `count` candidates for the scale of values *
   unit. Without moments, weights has a weight for each column. With moments[32][32] (from kt_copy_moments), weights has
   the initial values of the products with the moments. */
typedef struct {
    const uint8_t *values;
    float unit;
    const float *weights, *moments;
    kt_code_range codes;
    int count;
    float scales[KT_CANDIDATES], reciprocals[KT_CANDIDATES];
} kt_group_search;

/* Writes for each candidate KT_SUM_LANES partial sums of the squared error, and KT_SEARCHED_GROUP codes. group_errors
   weights the errors; group_forms uses the metric of second moments, for a count that is a multiple of 4. */
typedef void kt_group_errors_fn(const kt_group_search *search, float *lanes, int8_t *codes);

/* sums[v][l] += vectors[i][v] * panel[i][l], i = 0 .. count-1 in that order: v of KT_TOGETHER, l of KT_SUM_LANES. */
typedef void kt_outer_sums_fn(int64_t count, const float *vectors, const float *panel, float *sums);

/* Second moments: a symmetric matrix with rows `stride` floats apart, times unit. */
typedef struct {
    const float *values;
    int64_t stride;
    float unit;
} kt_moments;

/* Second moments of k columns. unit: the power of two that brings the largest number of the diagonal to 1 .. 2; 0 if
   that number is 0. */
static inline kt_moments kt_make_moments(const float *values, int64_t stride, int64_t k) {
    kt_moments moments = {values, stride, 0.0f};
    float largest = 0.0f;
    for (int64_t i = 0; i < k; i++) {
        float moment = moments.values[i * stride + i];
        largest = moment > largest ? moment : largest;
    }
    int exponent = (int)(kt_bits(largest) >> 23);
    exponent = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
    if (largest != 0.0f) moments.unit = kt_float((uint32_t)(254 - exponent) << 23);
    return moments;
}

/* Copies rows first .. first+count-1 and `width` columns from `column` on as an upper triangle (twice the moments above
   the diagonal, 0 below it), for which x * part * xT is the same as for the symmetric matrix. */
static inline void kt_copy_moments(const kt_moments *moments, int64_t first, int64_t count, int64_t column,
                                   int64_t width, float *part) {
    const float twice = 2.0f * moments->unit;
    for (int64_t i = first; i < first + count; i++, part += width) {
        const float *row = moments->values + i * moments->stride + column;
        for (int64_t c = 0; c < width; c++)
            part[c] = i < column + c ? row[c] * twice : i == column + c ? row[c] * moments->unit : 0.0f;
    }
}

/* Adds up the lanes, which are overwritten: adds the upper half to the lower half until one lane remains. */
static inline float kt_add_lanes(float *lanes) {
    for (int half = KT_SUM_LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

#endif
