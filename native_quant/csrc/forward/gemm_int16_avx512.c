/* Products of int16, AVX-512. */
#include "gemm_int16_avx512.h"

TARGET static inline ints add_products(ints sum, ints weights, ints pairs) {
    sum = add_epi32(sum, madd_epi16(weights, pairs));
    __asm__("" : "+v"(sum));
    return sum;
}

#include "gemm_int16_template.h"

void kt_gemm_int16_avx512(const kt_bf16_gemm *job) {
    kt_gemm_bf16_in_steps(job, &steps);
}
