/* The sum over NUMA parts, as BF16: 16 columns at a time. */
#include "outputs_avx2.h"

KT_TARGET_AVX2 static inline __m256i bf16_of_sum(int64_t terms, const float *const *rows, int64_t c) {
    __m256 sum = _mm256_loadu_ps(rows[0] + c);
    for (int64_t i = 1; i < terms; i++) sum = _mm256_add_ps(sum, _mm256_loadu_ps(rows[i] + c));
    return _mm256_srli_epi32(kt_bf16_above(sum), 16);
}

KT_TARGET_AVX2 void kt_merge_avx2(int64_t terms, const float *const *rows, int64_t columns, uint16_t *out) {
    for (int64_t c = 0; c < columns; c += 16) {
        __m256i packed = _mm256_packus_epi32(bf16_of_sum(terms, rows, c), bf16_of_sum(terms, rows, c + 8));
        _mm256_storeu_si256((__m256i *)(out + c),
                            _mm256_permute4x64_epi64(packed, 0xd8)); /* packing works within 128-bit lanes */
    }
}
