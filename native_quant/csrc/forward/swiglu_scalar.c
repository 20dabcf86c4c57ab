/* silu(gate) * up. */
#include "outputs_scalar.h"

void kt_swiglu_scalar(const kt_outputs *job) {
    for (int64_t t = 0; t < job->m; t++)
        for (int64_t r = 0; r < KT_PANEL_ROWS; r++) {
            float gate = kt_output(job, 0, t, r), up = kt_output(job, 1, t, r);
            job->out[t * job->out_pitch + r] = kt_rounded(job->exact, kt_silu(gate) * up);
        }
}
