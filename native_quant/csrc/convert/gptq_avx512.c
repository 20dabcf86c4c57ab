/* AVX-512: a column of 32 rows in 2 vectors. The divisions of a column wait for the one before it only, so they overlap
 * with what it takes from the others. min and max give their second operand where one is NaN, so NaN stays NaN. */
#include <immintrin.h>

#include "bf16.h"
#include "kernels.h"

enum { LANES = 16, VECTORS = KT_STRIP_ROWS / LANES };

/* bf16.h: kt_to_bf16, back in float32. */
KT_TARGET_AVX512 static inline __m512 to_bf16(__m512 y) {
    __m512i u = _mm512_castps_si512(y), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    u = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
    u = _mm512_and_si512(u, _mm512_set1_epi32((int)0xffff0000));
    const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(KT_BF16_NAN << 16));
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(y, y, _CMP_UNORD_Q), _mm512_castsi512_ps(u), nan);
}

KT_TARGET_AVX512 void kt_gptq_avx512(const kt_gptq *job) {
    const __m512 least = _mm512_set1_ps((float)job->least), most = _mm512_set1_ps((float)job->most);
    for (int64_t i = 0; i < job->width; i++) {
        const float *inverse = job->inverse + i * job->width;
        const __m512 diagonal = _mm512_set1_ps(inverse[i]);
        __m512 e[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            int64_t at = i * KT_STRIP_ROWS + v * LANES;
            __m512 w = _mm512_load_ps(job->weight + at), scale = _mm512_load_ps(job->scale + at);
            __m512 q = _mm512_min_ps(most, _mm512_max_ps(least, _mm512_div_ps(w, scale)));
            __m512 y = _mm512_mul_ps(_mm512_roundscale_ps(q, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), scale);
            if (job->rounded) y = to_bf16(y);
            e[v] = _mm512_div_ps(_mm512_sub_ps(w, y), diagonal);
            _mm512_store_ps(job->scale + at, y);
            _mm512_store_ps(job->error + at, e[v]);
        }
        for (int64_t c = i; c < job->width; c++) {
            const __m512 h = _mm512_set1_ps(inverse[c]);
            for (int v = 0; v < VECTORS; v++) {
                float *w = job->weight + c * KT_STRIP_ROWS + v * LANES;
                _mm512_store_ps(w, _mm512_sub_ps(_mm512_load_ps(w), _mm512_mul_ps(e[v], h)));
            }
        }
    }
}
