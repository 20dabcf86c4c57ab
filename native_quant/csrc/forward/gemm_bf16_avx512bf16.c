/* Products of BF16, AVX512-BF16: vdpbf16ps takes 16 pairs at a time. */
#include <stdint.h>
#include <string.h>

#include "vectors_avx512.h"

#undef TARGET
#define TARGET KT_TARGET_AVX512BF16
#include "fp8_to_bf16_avx512bf16.h"
typedef uint16_t item;

#include "gemm_avx512.h"

TARGET static inline __m512 multiply(__m512 sum, __m512i weights, const item *a) {
    int32_t two;
    memcpy(&two, a, sizeof two);
    return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(two));
}

#include "gemm_bf16_avx512.h"

static void copy(const uint16_t *a, int64_t columns, void *out) {
    memcpy(out, a, (size_t)columns * sizeof *a);
}

#define FEW(X) KT_UP_TO_6(X, KT_BF16_CODES) KT_UP_TO_6(X, KT_E4M3)
#include "gemm_bf16_few.h"

static const kt_bf16_steps steps = {
    BLOCK, 0, sizeof(item), KT_CHUNK_COLUMNS * sizeof(item), copy, run_block, KT_IN_ORDER_COLUMNS,
    {FEW(KT_NAME_FEW)},
};

void kt_gemm_bf16_avx512bf16(const kt_bf16_gemm *job) {
    kt_gemm_bf16_in_steps(job, &steps);
}
