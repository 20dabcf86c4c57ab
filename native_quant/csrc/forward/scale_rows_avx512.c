/* Dot products times their two scales, 16 rows at a time. */
#include "outputs_avx512.h"

KT_TARGET_AVX512 void kt_scale_rows_avx512(const kt_outputs *job) {
    for (int64_t t = 0; t < job->m; t++)
        for (int64_t r = 0; r < KT_STRIP_ROWS; r += 16) {
            __m512 y = kt_output(job, 0, t, r);
            if (job->rest[t]) y = _mm512_add_ps(y, kt_output(job, 0, job->rest[t], r));
            _mm512_storeu_ps(job->out + t * job->out_pitch + r, y);
        }
}
