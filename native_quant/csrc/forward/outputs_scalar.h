/* From integers back to floats, one at a time (numerics.md, section 5). */
#ifndef KT_OUTPUTS_SCALAR_H
#define KT_OUTPUTS_SCALAR_H

#include "bf16.h"
#include "kernels.h"

static inline float kt_round_if_exact(int exact, float x) {
    return exact ? kt_from_bf16(kt_to_bf16(x)) : x;
}

static inline float kt_output(const kt_outputs *job, int64_t t, int64_t r) {
    float y = (float)job->acc[t * KT_PANEL_ROWS + r] * job->unit;
    return kt_round_if_exact(job->exact, job->token_scale[t] * (job->row_scale[r] * y));
}

#endif
