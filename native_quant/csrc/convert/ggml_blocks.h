/* The blocks of ggml that are decoded here (ggml-common.h), and what their kernels share. numerics.md, section 1. */
#ifndef KT_GGML_BLOCKS_H
#define KT_GGML_BLOCKS_H

#include "bf16.h"
#include "kernels.h"

typedef struct {
    uint8_t d[2], q[16]; /* scale: FP16; byte j: column j in its lower half, j + 16 in its upper */
} kt_q4_0;

typedef struct {
    uint8_t d[2];
    int8_t q[32];
} kt_q8_0;

typedef struct {
    uint8_t e, q[16]; /* scale: E8M0; bytes as in kt_q4_0 */
} kt_ggml_mxfp4;

/* 8 groups of 32 columns; byte j of 32 holds column j of one group in its lower half, of the next in its upper. */
typedef struct {
    uint8_t d[2], least[2], scales[12], q[128];
} kt_q4_k;

typedef struct {
    uint8_t d[2], least[2], scales[12], high[32], q[128]; /* bit g of high[j]: the fifth bit of column j of group g */
} kt_q5_k;

/* 16 groups of 16 columns. */
typedef struct {
    uint8_t low[128], high[64];
    int8_t scales[16];
    uint8_t d[2];
} kt_q6_k;

/* The value of a code of group g of a kt_q4_k or kt_q5_k is code * scale - least. */
typedef struct {
    float scale[8], least[8];
} kt_k_scales;

static inline kt_k_scales kt_unpack_k_scales(const uint8_t d[2], const uint8_t least[2], const uint8_t packed[12]) {
    float unit = kt_from_fp16(kt_load16(d)), least_unit = kt_from_fp16(kt_load16(least));
    kt_k_scales scales;
    for (int g = 0; g < 8; g++) {
        int scale = g < 4 ? packed[g] & 63 : (packed[g + 4] & 15) | packed[g - 4] >> 6 << 4;
        int minimum = g < 4 ? packed[g + 4] & 63 : packed[g + 4] >> 4 | packed[g] >> 6 << 4;
        scales.scale[g] = unit * (float)scale;
        scales.least[g] = least_unit * (float)minimum;
    }
    return scales;
}

/* Half of 2^(e-127), for twice the values of E2M1; 255 is NaN. */
static inline float kt_half_e8m0(uint8_t e) {
    if (e == 255) return kt_float(0x7fc00000);
    return kt_float(e < 2 ? (uint32_t)0x200000 << e : (uint32_t)(e - 1) << 23);
}

/* Twice the values of E2M1; ggml has no -0. */
static const float kt_doubled_e2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
static const float kt_nibbles[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
static const float kt_nibbles_less_8[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};

/* Whether all scales of a block are finite: vector kernels leave the others to the scalar one, which makes NaN as it
 * should be. */
static inline int kt_has_finite_scales(int kind, const uint8_t *block) {
    enum { FP16_INFINITY = 0x7c00 };
    int d = kt_load16(block), least = 0;
    if (kind == KTQ_GGML_MXFP4) return *block != 255;
    if (kind == KTQ_Q6_K) d = kt_load16(((const kt_q6_k *)block)->d);
    if (kind == KTQ_Q4_K || kind == KTQ_Q5_K) least = kt_load16(block + 2);
    return (d & FP16_INFINITY) != FP16_INFINITY && (least & FP16_INFINITY) != FP16_INFINITY;
}

#endif
