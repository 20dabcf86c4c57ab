/* Dot products with AMXINT4 weights. */
enum { BITS = 4, TWO_STREAMS = 0 }; /* half the bytes of INT8: two gain nothing */

#include "gemm_avxvnni.h"

int kt_gemm_int4_avxvnni(const kt_gemm *job) {
    return kt_gemm_in_steps(job, &steps);
}
