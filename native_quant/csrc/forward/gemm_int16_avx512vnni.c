/* Products of int16, AVX-512 VNNI: vpdpwssd takes 16 pairs at a time, and adds. */
#include "gemm_int16_avx512.h"
#undef TARGET
#define TARGET KT_TARGET_AVX512VNNI

TARGET static inline ints add_products(ints sum, ints weights, ints pairs) {
    sum = _mm512_dpwssd_epi32(sum, weights, pairs);
    __asm__("" : "+v"(sum));
    return sum;
}

#include "gemm_int16_template.h"

void kt_gemm_int16_avx512vnni(const kt_bf16_gemm *job) {
    kt_gemm_bf16_in_steps(job, &steps);
}
