/* Dot products times their two scales, 8 rows at a time. */
#include "outputs_avx2.h"

KT_TARGET_AVX2 void kt_scale_rows_avx2(const kt_outputs *job) {
    for (int64_t t = 0; t < job->m; t++)
        for (int64_t r = 0; r < KT_STRIP_ROWS; r += 8) {
            __m256 y = kt_output(job, 0, t, r);
            if (job->rest[t]) y = _mm256_add_ps(y, kt_output(job, 0, job->rest[t], r));
            _mm256_storeu_ps(job->out + t * job->out_pitch + r, y);
        }
}
