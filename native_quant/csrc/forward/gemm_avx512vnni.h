/* vpdpbusd: four unsigned by four signed bytes, added to an int32, in one instruction. The codes are the unsigned ones.
 */
#ifndef KT_GEMM_AVX512VNNI_H
#define KT_GEMM_AVX512VNNI_H

#include <string.h>

#include "gemm_avx512.h"

#define TARGET KT_TARGET_AVX512VNNI
#include "gemm_avx512_sums.h"

TARGET static inline __m512i multiply(__m512i sum, __m512i codes, const int8_t *a) {
    int32_t four;
    memcpy(&four, a, sizeof four);
    return _mm512_dpbusd_epi32(sum, codes, _mm512_set1_epi32(four));
}

#endif
