/* From integers back to floats, a vector at a time: outputs_scalar.h operation for operation. */
#ifndef KT_OUTPUTS_TEMPLATE_H
#define KT_OUTPUTS_TEMPLATE_H

#include "bf16_template.h"

TARGET static inline floats kt_round_if_exact(int exact, floats x) {
    return exact ? upper_half(round_to_bf16(x)) : x;
}

/* y of rows r .. r + LANES - 1 of token t. */
TARGET static inline floats kt_output(const kt_outputs *job, int64_t t, int64_t r) {
    floats acc = cvtepi32_ps(load_si(job->acc + t * KT_PANEL_ROWS + r));
    floats y = mul_ps(loadu_ps(job->row_scale + r), mul_ps(acc, set1_ps(job->unit)));
    return kt_round_if_exact(job->exact, mul_ps(set1_ps(job->token_scale[t]), y));
}

#endif
