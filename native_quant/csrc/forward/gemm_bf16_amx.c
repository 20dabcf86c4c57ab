/* Products of BF16 where there is AMX, that is on Intel's processors: vdpbf16ps is slower there than the two fused
 * multiply-adds that it stands for (cpu.c). */
#include "kernels.h"

void kt_gemm_bf16_amx(const kt_bf16_gemm *job) {
    kt_gemm_bf16_avx512(job);
}
