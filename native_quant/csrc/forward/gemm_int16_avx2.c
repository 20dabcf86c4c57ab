/* Products of int16, AVX2: 12 of 16 registers hold sums. */
#include "vectors_avx2.h"

enum { BLOCK = 6 };
#define BLOCKS(X) X(1) X(2) X(3) X(4) X(5) X(6)

TARGET static inline ints add_products(ints sum, ints weights, ints pairs) {
    sum = add_epi32(sum, madd_epi16(weights, pairs));
    __asm__("" : "+x"(sum)); /* here, so that it stays in its register: GCC would put all products off */
    return sum;
}

#include "gemm_int16_template.h"

void kt_gemm_int16_avx2(const kt_bf16_gemm *job) {
    kt_gemm_bf16_in_steps(job, &steps);
}
