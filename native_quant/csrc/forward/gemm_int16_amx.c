/* AMX has no products of int16: codes become BF16. */
#include "kernels.h"

void kt_gemm_int16_amx(const kt_bf16_gemm *job) {
    kt_gemm_bf16_amx(job);
}
