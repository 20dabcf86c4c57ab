/* From integers back to floats, one at a time (numerics.md, section 5). */
#ifndef KT_OUTPUTS_SCALAR_H
#define KT_OUTPUTS_SCALAR_H

#include <math.h>

#include "bf16.h"
#include "kernels.h"

static inline float kt_rounded(int exact, float x) {
    return exact ? kt_from_bf16(kt_to_bf16(x)) : x;
}

static inline float kt_output(const kt_outputs *job, int which, int64_t t, int64_t r) {
    float y = (float)job->acc[which][t * KT_PANEL_ROWS + r] * job->unit;
    return kt_rounded(job->exact, job->token_scale[t] * (job->row_scale[which][r] * y));
}

/* exp(x) for x <= 88: 2^(x log2 e), the integer part as an exponent, the fraction by kt-kernel's polynomial. */
static inline float kt_exp(float x) {
    /* Below it 1 + exp(x) is 1; the comparison keeps a NaN. */
    if (x < -87.0f) x = -87.0f;
    float y = x * 0x1.715476p+0f;
    float whole = y + 0x1.8p23f;
    float fraction = y - (whole - 0x1.8p23f);
    float p = 0.0013333558f;
    p = fmaf(p, fraction, 0.0096181291f);
    p = fmaf(p, fraction, 0.0555041087f);
    p = fmaf(p, fraction, 0.2402265069f);
    p = fmaf(p, fraction, 0.6931471805f);
    p = fmaf(p, fraction, 0.9999999995f);
    return p * kt_float((kt_bits(whole) - kt_bits(0x1.8p23f) + 127) << 23);
}

static inline float kt_silu(float x) {
    float minus = 0.0f - x;
    if (minus > 88.0f) minus = 88.0f;
    return x * (1.0f / (1.0f + kt_exp(minus)));
}

#endif
