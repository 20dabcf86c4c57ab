/* Dot products with AMXINT8 weights. */
#include "gemm_scalar.h"

int kt_gemm_int8_scalar(const kt_gemm *job) {
    return kt_gemm_plain(8, job);
}
