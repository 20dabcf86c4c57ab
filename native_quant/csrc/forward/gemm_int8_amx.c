/* Dot products with AMXINT8 weights in AMX tiles. */
#include "gemm_amx.h"

KT_TARGET_AMX static int multiply(const kt_gemm *job) {
    return kt_gemm_tiles(8, job);
}

/* Tiles with so few rows were made for the VNNI kernel (tiling_amx.c). */
int kt_gemm_int8_amx(const kt_gemm *job) {
    return job->tile_rows > kt_vnni_tokens(8) ? multiply(job) : kt_gemm_int8_avx512vnni(job);
}
