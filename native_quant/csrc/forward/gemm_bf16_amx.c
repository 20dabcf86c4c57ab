/* Products of BF16 where there is AMX, that is on Intel's processors: their vdpbf16ps takes four times as long as a
 * fused multiply-add, which is half of it (Emerald Rapids). */
#include "kernels.h"

void kt_gemm_bf16_amx(const kt_bf16_gemm *job) {
    kt_gemm_bf16_avx512(job);
}
