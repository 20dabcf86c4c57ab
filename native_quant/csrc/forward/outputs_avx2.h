/* From integers back to floats, 8 at a time: outputs_scalar.h operation for operation. */
#ifndef KT_OUTPUTS_AVX2_H
#define KT_OUTPUTS_AVX2_H

#include <immintrin.h>

#include "bf16.h"
#include "kernels.h"

/* kt_to_bf16 in the upper half of each 32 bits; the lower half holds what is left of the sum. */
KT_TARGET_AVX2 static inline __m256i kt_bf16_above(__m256 x) {
    __m256i u = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(KT_BF16_NAN << 16), is_nan);
}

KT_TARGET_AVX2 static inline __m256 kt_rounded(int exact, __m256 x) {
    if (!exact) return x;
    return _mm256_castsi256_ps(_mm256_and_si256(kt_bf16_above(x), _mm256_set1_epi32((int)0xffff0000)));
}

/* y of rows r .. r + 7 of token t. */
KT_TARGET_AVX2 static inline __m256 kt_output(const kt_outputs *job, int which, int64_t t, int64_t r) {
    __m256 acc = _mm256_cvtepi32_ps(_mm256_load_si256((const __m256i *)(job->acc[which] + t * KT_STRIP_ROWS + r)));
    __m256 y = _mm256_mul_ps(_mm256_loadu_ps(job->row_scale[which] + r), _mm256_mul_ps(acc, _mm256_set1_ps(job->unit)));
    return kt_rounded(job->exact, _mm256_mul_ps(_mm256_set1_ps(job->token_scale[t]), y));
}

KT_TARGET_AVX2 static inline __m256 kt_exp(__m256 x) {
    const __m256 magic = _mm256_set1_ps(0x1.8p23f);
    x = _mm256_max_ps(_mm256_set1_ps(-87.0f), x); /* of a NaN and a number, the second operand */
    __m256 y = _mm256_mul_ps(x, _mm256_set1_ps(0x1.715476p+0f));
    __m256 whole = _mm256_add_ps(y, magic), fraction = _mm256_sub_ps(y, _mm256_sub_ps(whole, magic));
    __m256 p = _mm256_set1_ps(0.0013333558f);
    p = _mm256_fmadd_ps(p, fraction, _mm256_set1_ps(0.0096181291f));
    p = _mm256_fmadd_ps(p, fraction, _mm256_set1_ps(0.0555041087f));
    p = _mm256_fmadd_ps(p, fraction, _mm256_set1_ps(0.2402265069f));
    p = _mm256_fmadd_ps(p, fraction, _mm256_set1_ps(0.6931471805f));
    p = _mm256_fmadd_ps(p, fraction, _mm256_set1_ps(0.9999999995f));
    /* The shift drops what magic has above the integer. */
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_castps_si256(whole), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(power));
}

KT_TARGET_AVX2 static inline __m256 kt_silu(__m256 x) {
    __m256 minus = _mm256_min_ps(_mm256_set1_ps(88.0f), _mm256_sub_ps(_mm256_setzero_ps(), x));
    const __m256 one = _mm256_set1_ps(1.0f);
    return _mm256_mul_ps(x, _mm256_div_ps(one, _mm256_add_ps(one, kt_exp(minus))));
}

#endif
