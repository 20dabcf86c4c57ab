/* Products of BF16, AVX-512 without AVX512-BF16: 16 rows' first or second columns as float32, and fused multiply-adds.
 * Products of BF16 are exact in float32, so the sums are those of vdpbf16ps. */
#include "vectors_avx512.h"

#include "fp8_to_bf16.h"

typedef float item;

#include "gemm_avx512.h"

TARGET static inline __m512 multiply(__m512 sum, __m512i weights, const item *a) {
    __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(weights, 16));
    __m512 second = _mm512_castsi512_ps(_mm512_and_si512(weights, _mm512_set1_epi32((int)0xffff0000)));
    return _mm512_fmadd_ps(first, _mm512_set1_ps(a[0]), _mm512_fmadd_ps(second, _mm512_set1_ps(a[1]), sum));
}

#include "gemm_bf16_avx512.h"

TARGET static void copy(const uint16_t *a, int64_t columns, void *out) {
    for (int64_t j = 0; j < columns; j += 16) {
        __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(a + j)));
        _mm512_storeu_si512((item *)out + j, _mm512_slli_epi32(words, 16));
    }
}

#define FEW(X) KT_UP_TO_6(X, KT_BF16_CODES) KT_UP_TO_6(X, KT_E4M3)
#include "gemm_bf16_few.h"

static const kt_bf16_steps steps = {
    BLOCK, 0, sizeof(item), KT_CHUNK_COLUMNS * sizeof(item), copy, run_block, KT_IN_ORDER_COLUMNS,
    {FEW(KT_NAME_FEW)},
};

void kt_gemm_bf16_avx512(const kt_bf16_gemm *job) {
    kt_gemm_bf16_in_steps(job, &steps);
}
