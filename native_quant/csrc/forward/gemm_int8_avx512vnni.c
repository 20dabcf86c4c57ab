/* Dot products with AMXINT8 weights. */
#include "gemm_avx512vnni.h"

enum { BITS = 8, OFFSET = 128 };

/* A flipped sign bit adds 128. */
TARGET static inline __m512i low_codes(__m512i bytes) {
    return _mm512_xor_si512(bytes, _mm512_set1_epi8(-128));
}
TARGET static inline __m512i high_codes(__m512i bytes) {
    return bytes;
}

#include "gemm_avx512_kernel.h"

/* With one token, VNNI is so fast that loads run far ahead of the processor's prefetching; without it, a job takes 0.9 of
 * the time (Zen 4). */
int kt_gemm_int8_avx512vnni(const kt_gemm *job) {
    return job->m == 1 && is_read_in_order(job) ? kt_gemm_int8_avx512(job) : gemm(job);
}
