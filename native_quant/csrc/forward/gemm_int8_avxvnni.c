/* Dot products with AMXINT8 weights. */
enum { BITS = 8, TWO_STREAMS = 1 }; /* 7 to 12 tokens take 1 to 6 % less than with one (Emerald Rapids) */

#include "gemm_avxvnni.h"

int kt_gemm_int8_avxvnni(const kt_gemm *job) {
    return kt_gemm_in_steps(job, &steps);
}
