/* Scales of least squared error: what the loops (convert/scale_search.c, convert/group_search.c) and their kernels
 * share. NUMERICS.md, sections 2b and 2d. */
#ifndef KT_SCALE_SEARCH_H
#define KT_SCALE_SEARCH_H

#include <stdint.h>

enum { KT_CANDIDATES = 16, KT_SUM_LANES = 16, KT_SEARCHED_GROUP = 32 };

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
   are for values that are multiplied by unit. weights: of each column. */
typedef struct {
    const uint8_t *values;
    float unit;
    const float *weights;
    kt_code_range codes;
    int count;
    float scales[KT_CANDIDATES], reciprocals[KT_CANDIDATES];
} kt_group_search;

/* Of each candidate, the lanes of the sum of squared errors, KT_SUM_LANES, and the codes, KT_SEARCHED_GROUP. */
typedef void kt_group_errors_fn(const kt_group_search *search, float *lanes, int8_t *codes);

/* The sum of the lanes, which are overwritten: the upper half is added to the lower one until one is left. */
static inline float kt_add_lanes(float *lanes) {
    for (int half = KT_SUM_LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

#endif
