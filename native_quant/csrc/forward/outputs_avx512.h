/* From integers back to floats, 16 at a time: outputs_scalar.h operation for operation. */
#ifndef KT_OUTPUTS_AVX512_H
#define KT_OUTPUTS_AVX512_H

#include <immintrin.h>

#include "bf16.h"
#include "kernels.h"

/* kt_to_bf16 in the upper half of each 32 bits; the lower half holds what is left of the sum. */
KT_TARGET_AVX512 static inline __m512i kt_bf16_above(__m512 x) {
    __m512i u = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(KT_BF16_NAN << 16));
}

KT_TARGET_AVX512 static inline __m512 kt_rounded(int exact, __m512 x) {
    if (!exact) return x;
    return _mm512_castsi512_ps(_mm512_and_si512(kt_bf16_above(x), _mm512_set1_epi32((int)0xffff0000)));
}

/* y of rows r .. r + 15 of token t. */
KT_TARGET_AVX512 static inline __m512 kt_output(const kt_outputs *job, int which, int64_t t, int64_t r) {
    __m512 acc = _mm512_cvtepi32_ps(_mm512_load_si512(job->acc[which] + t * KT_STRIP_ROWS + r));
    __m512 y = _mm512_mul_ps(_mm512_loadu_ps(job->row_scale[which] + r), _mm512_mul_ps(acc, _mm512_set1_ps(job->unit)));
    return kt_rounded(job->exact, _mm512_mul_ps(_mm512_set1_ps(job->token_scale[t]), y));
}

KT_TARGET_AVX512 static inline __m512 kt_exp(__m512 x) {
    const __m512 magic = _mm512_set1_ps(0x1.8p23f);
    x = _mm512_max_ps(_mm512_set1_ps(-87.0f), x); /* of a NaN and a number, the second operand */
    __m512 y = _mm512_mul_ps(x, _mm512_set1_ps(0x1.715476p+0f));
    __m512 whole = _mm512_add_ps(y, magic), fraction = _mm512_sub_ps(y, _mm512_sub_ps(whole, magic));
    __m512 p = _mm512_set1_ps(0.0013333558f);
    p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(0.0096181291f));
    p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(0.0555041087f));
    p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(0.2402265069f));
    p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(0.6931471805f));
    p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(0.9999999995f));
    /* The shift drops what magic has above the integer. */
    __m512i power = _mm512_slli_epi32(_mm512_add_epi32(_mm512_castps_si512(whole), _mm512_set1_epi32(127)), 23);
    return _mm512_mul_ps(p, _mm512_castsi512_ps(power));
}

KT_TARGET_AVX512 static inline __m512 kt_silu(__m512 x) {
    __m512 minus = _mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_sub_ps(_mm512_setzero_ps(), x));
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_mul_ps(x, _mm512_div_ps(one, _mm512_add_ps(one, kt_exp(minus))));
}

#endif
