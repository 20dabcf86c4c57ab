/* The sum over NUMA parts, as BF16: 32 columns at a time. */
#include "outputs_avx512.h"

KT_TARGET_AVX512 static inline __m512i bf16_of_sum(int64_t terms, const float *const *rows, int64_t c) {
    __m512 sum = _mm512_loadu_ps(rows[0] + c);
    for (int64_t i = 1; i < terms; i++) sum = _mm512_add_ps(sum, _mm512_loadu_ps(rows[i] + c));
    return _mm512_srli_epi32(kt_bf16_above(sum), 16);
}

KT_TARGET_AVX512 void kt_merge_avx512(int64_t terms, const float *const *rows, int64_t columns, uint16_t *out) {
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7); /* packing works within 128-bit lanes */
    for (int64_t c = 0; c < columns; c += 32) {
        __m512i packed = _mm512_packus_epi32(bf16_of_sum(terms, rows, c), bf16_of_sum(terms, rows, c + 16));
        _mm512_storeu_si512(out + c, _mm512_permutexvar_epi64(order, packed));
    }
}
