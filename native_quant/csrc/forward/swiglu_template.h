/* silu(gate) * up, a vector of rows at a time. */
#include "outputs_template.h"

TARGET void KERNEL_OF(swiglu)(const kt_outputs *job) {
    for (int64_t t = 0; t < job->m; t++)
        for (int64_t r = 0; r < KT_PANEL_ROWS; r += LANES) {
            floats gate = kt_output(job, 0, t, r), up = kt_output(job, 1, t, r);
            storeu_ps(job->out + t * job->out_pitch + r, kt_rounded(job->exact, mul_ps(kt_silu(gate), up)));
        }
}
