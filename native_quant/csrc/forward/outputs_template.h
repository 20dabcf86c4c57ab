/* From integers back to floats, a vector at a time: outputs_scalar.h operation for operation. */
#ifndef KT_OUTPUTS_TEMPLATE_H
#define KT_OUTPUTS_TEMPLATE_H

#include "bf16_template.h"

TARGET static inline floats kt_rounded(int exact, floats x) {
    return exact ? upper_half(bf16_above(x)) : x;
}

/* y of rows r .. r + LANES - 1 of token t. */
TARGET static inline floats kt_output(const kt_outputs *job, int which, int64_t t, int64_t r) {
    floats acc = cvtepi32_ps(load_si(job->acc[which] + t * KT_PANEL_ROWS + r));
    floats y = mul_ps(loadu_ps(job->row_scale[which] + r), mul_ps(acc, set1_ps(job->unit)));
    return kt_rounded(job->exact, mul_ps(set1_ps(job->token_scale[t]), y));
}

TARGET static inline floats kt_exp(floats x) {
    const floats magic = set1_ps(0x1.8p23f);
    x = max_ps(set1_ps(-87.0f), x); /* of a NaN and a number, the second operand */
    floats y = mul_ps(x, set1_ps(0x1.715476p+0f));
    floats whole = add_ps(y, magic), fraction = sub_ps(y, sub_ps(whole, magic));
    floats p = set1_ps(0.0013333558f);
    p = fmadd_ps(p, fraction, set1_ps(0.0096181291f));
    p = fmadd_ps(p, fraction, set1_ps(0.0555041087f));
    p = fmadd_ps(p, fraction, set1_ps(0.2402265069f));
    p = fmadd_ps(p, fraction, set1_ps(0.6931471805f));
    p = fmadd_ps(p, fraction, set1_ps(0.9999999995f));
    /* The shift drops what magic has above the integer. */
    ints power = slli_epi32(add_epi32(castps_si(whole), set1_epi32(127)), 23);
    return mul_ps(p, castsi_ps(power));
}

TARGET static inline floats kt_silu(floats x) {
    floats minus = min_ps(set1_ps(88.0f), sub_ps(setzero_ps(), x));
    const floats one = set1_ps(1.0f);
    return mul_ps(x, div_ps(one, add_ps(one, kt_exp(minus))));
}

#endif
