/* AVX-512: the 16 lanes of a sum are a vector. Eight candidates at a time, so that their sums stay in registers; what
 * the first eight computed of a row is read again from L1. */
#include <immintrin.h>

#include "kernels.h"

enum { LANES = KT_SUM_LANES, AT_ONCE = 8 };

/* The sums of the lanes of each of 16 vectors: upper halves are added to lower ones, of ever more vectors at once. */
KT_TARGET_AVX512 static inline __m512 add_lanes(const __m512 *v) {
    __m512 a[8], b[4], c[4];
    for (int i = 0; i < 8; i++)
        a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x44),
                             _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xee));
    for (int i = 0; i < 4; i++)
        b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xdd));
    for (int i = 0; i < 2; i++) {
        __m512d x = _mm512_castps_pd(b[2 * i]), y = _mm512_castps_pd(b[2 * i + 1]);
        c[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    __m512 sums = _mm512_add_ps(_mm512_shuffle_ps(c[0], c[1], 0x88), _mm512_shuffle_ps(c[0], c[1], 0xdd));
    /* v[4 * i + j] is in lane 4 * j + i. */
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), sums);
}

/* |x| in steps of the largest candidate; a subnormal x counts as 0. */
KT_TARGET_AVX512 static inline __m512 units_of(const uint8_t *values, __m512 reciprocal) {
    __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)values));
    __mmask16 normal = _mm512_test_epi32_mask(x, _mm512_set1_epi32(0x7f80));
    x = _mm512_slli_epi32(_mm512_and_si512(x, _mm512_set1_epi32(0x7fff)), 16);
    return _mm512_maskz_mul_ps(normal, _mm512_castsi512_ps(x), reciprocal);
}

/* Candidates first..first+7. */
KT_TARGET_AVX512 static inline __attribute__((always_inline)) void
sums_of(const kt_scale_search *search, int first, int weighted, float *products, float *squares) {
    const __m512 reciprocal = _mm512_set1_ps(search->reciprocal), round = _mm512_set1_ps(KT_ROUND);
    const __m512 most = _mm512_set1_ps(search->largest + KT_ROUND);
    __m512 sums[2 * AT_ONCE], ratio[AT_ONCE];
    for (int i = 0; i < AT_ONCE; i++) ratio[i] = _mm512_set1_ps(search->ratios[first + i]);
    for (int i = 0; i < 2 * AT_ONCE; i++) sums[i] = _mm512_setzero_ps();
    for (int64_t c = 0; c < search->k; c += LANES) {
        __m512 u = first ? _mm512_load_ps(search->units + c) : units_of(search->row + 2 * c, reciprocal);
        if (!first) _mm512_store_ps(search->units + c, u);
        __m512 h = weighted ? _mm512_loadu_ps(search->weights + c) : u;
        __m512 v = weighted ? _mm512_mul_ps(h, u) : u;
        for (int i = 0; i < AT_ONCE; i++) {
            __m512 q = _mm512_sub_ps(_mm512_min_ps(_mm512_fmadd_ps(u, ratio[i], round), most), round);
            sums[i] = _mm512_fmadd_ps(v, q, sums[i]);
            sums[AT_ONCE + i] = _mm512_fmadd_ps(weighted ? _mm512_mul_ps(h, q) : q, q, sums[AT_ONCE + i]);
        }
    }
    __m512 all = add_lanes(sums);
    _mm256_storeu_ps(products + first, _mm512_castps512_ps256(all));
    _mm256_storeu_ps(squares + first, _mm512_extractf32x8_ps(all, 1));
}

KT_TARGET_AVX512 void kt_scale_sums_avx512(const kt_scale_search *search, float *products, float *squares) {
    if (search->weights) {
        sums_of(search, 0, 1, products, squares);
        sums_of(search, AT_ONCE, 1, products, squares);
    } else {
        sums_of(search, 0, 0, products, squares);
        sums_of(search, AT_ONCE, 0, products, squares);
    }
}
