/* AVX-512: float32 to BF16. */
#ifndef KT_BF16_AVX512_H
#define KT_BF16_AVX512_H

#include <immintrin.h>

#include "isa.h"

/* Float32 to BF16 bits (kt_to_bf16), one in each 32-bit lane; not for NaN. */
KT_TARGET_AVX512 static inline __m512i to_bf16(__m512 x) {
    __m512i u = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    return _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
}

#endif
