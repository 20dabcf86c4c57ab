/* silu(gate) * up, 16 rows at a time. */
#include "outputs_avx512.h"

KT_TARGET_AVX512 void kt_swiglu_avx512(const kt_outputs *job) {
    for (int64_t t = 0; t < job->m; t++)
        for (int64_t r = 0; r < KT_STRIP_ROWS; r += 16) {
            __m512 gate = kt_output(job, 0, t, r), up = kt_output(job, 1, t, r);
            _mm512_storeu_ps(job->out + t * job->out_pitch + r,
                             kt_rounded(job->exact, _mm512_mul_ps(kt_silu(gate), up)));
        }
}
