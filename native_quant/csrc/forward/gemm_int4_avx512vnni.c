/* Dot products with AMXINT4 weights. */
#include "gemm_avx512vnni.h"

enum { BITS = 4, OFFSET = 8 };

/* (bytes & 15) ^ 8: a flipped sign bit adds 8. */
TARGET static inline __m512i low_codes(__m512i bytes) {
    return _mm512_ternarylogic_epi32(bytes, _mm512_set1_epi8(15), _mm512_set1_epi8(8), 0x6a);
}
TARGET static inline __m512i high_codes(__m512i bytes) {
    return low_codes(_mm512_srli_epi16(bytes, 4));
}

#include "gemm_avx512_kernel.h"

int kt_gemm_int4_avx512vnni(const kt_gemm *job) {
    return gemm(job);
}
