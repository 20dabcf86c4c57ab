/* Sums that stay in registers over all tiles: for kernels whose products are added as int32 at once. Define TARGET. */
#ifndef KT_GEMM_AVX512_SUMS_H
#define KT_GEMM_AVX512_SUMS_H

TARGET static inline __m512i load(const int32_t *c) {
    return _mm512_load_si512(c);
}
TARGET static inline __m512i rest(__m512i sum, int32_t *c) {
    (void)c;
    return sum;
}
TARGET static inline void store(int32_t *c, __m512i sum) {
    _mm512_store_si512(c, sum);
}

#endif
