/* vdpbf16ps takes as many products as vpdpwssd, of activations as they are. Codes of 6 bits become int16 sooner than
 * BF16, since those are multiplied by scales and rounded. */
#include "kernels.h"

void kt_gemm_int16_avx512bf16(const kt_bf16_gemm *job) {
    (job->panel->bits == 6 ? kt_gemm_int16_avx512vnni : kt_gemm_bf16_avx512bf16)(job);
}
