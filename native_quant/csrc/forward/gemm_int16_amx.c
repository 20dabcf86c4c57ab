/* AMX has no products of int16: codes become BF16. */
#include "gemm_int16.h"

void kt_gemm_int16_amx(const kt_bf16_gemm *job) {
    (kt_has_int8(job) ? kt_gemm_int16_avx512vnni : kt_gemm_bf16_amx)(job);
}
