/* AVX2: a column of 32 rows in 4 vectors (as in gptq_avx512.c). */
#include <immintrin.h>

#include "bf16.h"
#include "kernels.h"

enum { LANES = 8, VECTORS = KT_STRIP_ROWS / LANES };

/* bf16.h: kt_to_bf16, back in float32. */
KT_TARGET_AVX2 static inline __m256 to_bf16(__m256 y) {
    __m256i u = _mm256_castps_si256(y), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    u = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
    u = _mm256_and_si256(u, _mm256_set1_epi32((int)0xffff0000));
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(KT_BF16_NAN << 16));
    return _mm256_blendv_ps(_mm256_castsi256_ps(u), nan, _mm256_cmp_ps(y, y, _CMP_UNORD_Q));
}

KT_TARGET_AVX2 void kt_gptq_avx2(const kt_gptq *job) {
    const __m256 least = _mm256_set1_ps((float)job->least), most = _mm256_set1_ps((float)job->most);
    for (int64_t i = 0; i < job->width; i++) {
        const float *inverse = job->inverse + i * job->width;
        const __m256 diagonal = _mm256_set1_ps(inverse[i]);
        __m256 e[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            int64_t at = i * KT_STRIP_ROWS + v * LANES;
            __m256 w = _mm256_load_ps(job->weight + at), scale = _mm256_load_ps(job->scale + at);
            __m256 q = _mm256_min_ps(most, _mm256_max_ps(least, _mm256_div_ps(w, scale)));
            __m256 y = _mm256_mul_ps(_mm256_round_ps(q, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), scale);
            if (job->rounded) y = to_bf16(y);
            e[v] = _mm256_div_ps(_mm256_sub_ps(w, y), diagonal);
            _mm256_store_ps(job->scale + at, y);
            _mm256_store_ps(job->error + at, e[v]);
        }
        for (int64_t c = i; c < job->width; c++) {
            const __m256 h = _mm256_set1_ps(inverse[c]);
            for (int v = 0; v < VECTORS; v++) {
                float *w = job->weight + c * KT_STRIP_ROWS + v * LANES;
                _mm256_store_ps(w, _mm256_sub_ps(_mm256_load_ps(w), _mm256_mul_ps(e[v], h)));
            }
        }
    }
}
