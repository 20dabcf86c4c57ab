/* silu(gate) * up, 8 rows at a time. */
#include "outputs_avx2.h"

KT_TARGET_AVX2 void kt_swiglu_avx2(const kt_outputs *job) {
    for (int64_t t = 0; t < job->m; t++)
        for (int64_t r = 0; r < KT_STRIP_ROWS; r += 8) {
            __m256 gate = kt_output(job, 0, t, r), up = kt_output(job, 1, t, r);
            _mm256_storeu_ps(job->out + t * job->out_pitch + r,
                             kt_rounded(job->exact, _mm256_mul_ps(kt_silu(gate), up)));
        }
}
