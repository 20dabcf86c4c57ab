/* The definition in C: section 7 of numerics.md, a value at a time. */
#include "nearest_code.h"

void kt_gptq_scalar(const kt_gptq *job) {
    for (int64_t i = 0; i < job->width; i++) {
        const float *inverse = job->inverse + i * job->width;
        for (int r = 0; r < KT_PANEL_ROWS; r++) {
            float *w = job->weight + r, *scale = job->scale + i * KT_PANEL_ROWS + r;
            float y = kt_nearest_code(w[i * KT_PANEL_ROWS] / *scale, &job->codes) * *scale;
            if (job->rounded) y = kt_from_bf16(kt_to_bf16(y));
            float e = (w[i * KT_PANEL_ROWS] - y) / inverse[i];
            for (int64_t c = i; c < job->width; c++) w[c * KT_PANEL_ROWS] -= e * inverse[c];
            *scale = y;
            job->error[i * KT_PANEL_ROWS + r] = e;
        }
    }
}
