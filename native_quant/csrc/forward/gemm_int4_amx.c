/* Dot products with AMXINT4 weights in AMX tiles. */
#include "gemm_amx.h"

KT_TARGET_AMX static int multiply(const kt_gemm *job) {
    return kt_gemm_tiles(4, job);
}

/* Tiles with so few rows were made for the VNNI kernel (tiling_amx.c). */
int kt_gemm_int4_amx(const kt_gemm *job) {
    return job->tile_rows > kt_vnni_tokens(4) ? multiply(job) : kt_gemm_int4_avx512vnni(job);
}
