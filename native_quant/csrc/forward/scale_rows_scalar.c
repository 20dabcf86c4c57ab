/* Dot products times their two scales. */
#include "outputs_scalar.h"

void kt_scale_rows_scalar(const kt_outputs *job) {
    for (int64_t t = 0; t < job->m; t++)
        for (int64_t r = 0; r < KT_PANEL_ROWS; r++) {
            float y = kt_output(job, t, r);
            if (job->remainder_row && job->remainder_row[t]) y += kt_output(job, job->remainder_row[t], r);
            job->out[t * job->out_pitch + r] = y;
        }
}
