/* A column of 32 rows in a few vectors. The divisions of a column wait for the one before it only, so they overlap with
 * what it takes from the others. */
#include "bf16_template.h"
#include "nearest_code_template.h"

TARGET static inline __attribute__((always_inline)) void compensate(const kt_gptq *job, int precision) {
    enum { VECTORS = KT_PANEL_ROWS / LANES };
    const code_vectors codes = load_code_range(&job->codes, precision);
    for (int64_t i = 0; i < job->width; i++) {
        const float *inverse = job->inverse + i * job->width;
        const floats diagonal = set1_ps(inverse[i]);
        floats e[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            int64_t at = i * KT_PANEL_ROWS + v * LANES;
            floats w = load_ps(job->weight + at), scale = load_ps(job->scale + at);
            floats y = mul_ps(nearest_codes(div_ps(w, scale), codes), scale);
            if (job->rounded) y = upper_half(round_to_bf16(y));
            e[v] = div_ps(sub_ps(w, y), diagonal);
            store_ps(job->scale + at, y);
            store_ps(job->error + at, e[v]);
        }
        for (int64_t c = i; c < job->width; c++) {
            const floats h = set1_ps(inverse[c]);
            for (int v = 0; v < VECTORS; v++) {
                float *w = job->weight + c * KT_PANEL_ROWS + v * LANES;
                store_ps(w, sub_ps(load_ps(w), mul_ps(e[v], h)));
            }
        }
    }
}

TARGET void KERNEL_OF(gptq)(const kt_gptq *job) {
    if (job->codes.precision) compensate(job, job->codes.precision);
    else compensate(job, 0);
}
