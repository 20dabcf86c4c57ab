/* Dot products with AMXINT8 weights in AMX tiles. */
#include "gemm_amx.h"

KT_TARGET_AMX static void multiply(const kt_gemm *job) {
    kt_gemm_tiles(8, job);
}

void kt_gemm_int8_amx(const kt_gemm *job) {
    if (job->m <= KT_LEFT_TO_VNNI) kt_gemm_int8_avx512vnni(job);
    else multiply(job);
}
