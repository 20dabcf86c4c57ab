/* Dot products with AMXINT4 weights. */
#include "gemm_scalar.h"

int kt_gemm_int4_scalar(const kt_gemm *job) {
    return kt_gemm_plain(4, job);
}
