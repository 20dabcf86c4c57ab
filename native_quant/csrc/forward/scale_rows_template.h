/* Dot products times their two scales, a vector of rows at a time. */
#include "outputs_template.h"

TARGET void KERNEL_OF(scale_rows)(const kt_outputs *job) {
    for (int64_t t = 0; t < job->m; t++)
        for (int64_t r = 0; r < KT_PANEL_ROWS; r += LANES) {
            floats y = kt_output(job, t, r);
            if (job->remainder_row && job->remainder_row[t]) y = add_ps(y, kt_output(job, job->remainder_row[t], r));
            storeu_ps(job->out + t * job->out_pitch + r, y);
        }
}
