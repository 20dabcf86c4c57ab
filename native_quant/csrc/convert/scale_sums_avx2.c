/* AVX2: the 16 lanes of a sum are two vectors. Two candidates at a time, so that their sums stay in registers; what the
 * first two computed of a row is read again from L1. */
#include <immintrin.h>

#include "kernels.h"

enum { LANES = 8, AT_ONCE = 2 };

/* The sums of the 8 lanes of each of 4 vectors: upper halves are added to lower ones, of ever more vectors at once. */
KT_TARGET_AVX2 static inline __m128 add_lanes(__m256 p, __m256 q, __m256 r, __m256 s) {
    __m256 a = _mm256_add_ps(_mm256_permute2f128_ps(p, q, 0x20), _mm256_permute2f128_ps(p, q, 0x31));
    __m256 b = _mm256_add_ps(_mm256_permute2f128_ps(r, s, 0x20), _mm256_permute2f128_ps(r, s, 0x31));
    __m256d x = _mm256_castps_pd(a), y = _mm256_castps_pd(b);
    __m256 c = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
    /* p p r r | q q s s: two lanes of each are left */
    __m128 low = _mm256_castps256_ps128(c), high = _mm256_extractf128_ps(c, 1);
    __m128 even = _mm_shuffle_ps(low, high, 0x88), odd = _mm_shuffle_ps(low, high, 0xdd);
    return _mm_shuffle_ps(_mm_add_ps(even, odd), _mm_add_ps(even, odd), 0xd8); /* p r q s -> p q r s */
}

/* |x| in steps of the largest candidate; a subnormal x counts as 0. */
KT_TARGET_AVX2 static inline __m256 units_of(const uint8_t *values, __m256 reciprocal) {
    __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)values));
    x = _mm256_slli_epi32(_mm256_and_si256(x, _mm256_set1_epi32(0x7fff)), 16);
    __m256i normal = _mm256_cmpgt_epi32(x, _mm256_set1_epi32(0x7fffff));
    return _mm256_and_ps(_mm256_mul_ps(_mm256_castsi256_ps(x), reciprocal), _mm256_castsi256_ps(normal));
}

KT_TARGET_AVX2 static inline __attribute__((always_inline)) void
sums_of(const kt_scale_search *search, int first, int weighted, float *products, float *squares) {
    const __m256 round = _mm256_set1_ps(KT_ROUND), most = _mm256_set1_ps(search->largest + KT_ROUND);
    __m256 product[2 * AT_ONCE], square[2 * AT_ONCE], ratio[AT_ONCE];
    for (int i = 0; i < AT_ONCE; i++) ratio[i] = _mm256_set1_ps(search->ratios[first + i]);
    for (int i = 0; i < 2 * AT_ONCE; i++) product[i] = square[i] = _mm256_setzero_ps();
    for (int64_t c = 0; c < search->k; c += 2 * LANES) {
        for (int half = 0; half < 2; half++) {
            int64_t at = c + half * LANES;
            __m256 u = _mm256_load_ps(search->units + at);
            __m256 h = weighted ? _mm256_loadu_ps(search->weights + at) : u;
            __m256 v = weighted ? _mm256_mul_ps(h, u) : u;
            for (int i = 0; i < AT_ONCE; i++) {
                __m256 q = _mm256_sub_ps(_mm256_min_ps(_mm256_fmadd_ps(u, ratio[i], round), most), round);
                int sum = 2 * i + half;
                product[sum] = _mm256_fmadd_ps(v, q, product[sum]);
                square[sum] = _mm256_fmadd_ps(weighted ? _mm256_mul_ps(h, q) : q, q, square[sum]);
            }
        }
    }
    __m128 all = add_lanes(_mm256_add_ps(product[0], product[1]), _mm256_add_ps(product[2], product[3]),
                           _mm256_add_ps(square[0], square[1]), _mm256_add_ps(square[2], square[3]));
    _mm_storel_pi((__m64 *)(products + first), all);
    _mm_storeh_pi((__m64 *)(squares + first), all);
}

KT_TARGET_AVX2 void kt_scale_sums_avx2(const kt_scale_search *search, float *products, float *squares) {
    const __m256 reciprocal = _mm256_set1_ps(search->reciprocal);
    for (int64_t c = 0; c < search->k; c += LANES)
        _mm256_store_ps(search->units + c, units_of(search->row + 2 * c, reciprocal));
    for (int first = 0; first < KT_CANDIDATES; first += AT_ONCE)
        if (search->weights)
            sums_of(search, first, 1, products, squares);
        else
            sums_of(search, first, 0, products, squares);
}
