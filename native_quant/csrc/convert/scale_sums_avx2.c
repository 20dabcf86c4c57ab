/* AVX2: scale_sums_template.h. */
#include "vectors_avx2.h"

enum { AT_ONCE = 2 };

TARGET static inline void add_lanes(const floats *v, float *products, float *squares) {
    floats a = add_ps(_mm256_permute2f128_ps(v[0], v[1], 0x20), _mm256_permute2f128_ps(v[0], v[1], 0x31));
    floats b = add_ps(_mm256_permute2f128_ps(v[2], v[3], 0x20), _mm256_permute2f128_ps(v[2], v[3], 0x31));
    __m256d x = _mm256_castps_pd(a), y = _mm256_castps_pd(b);
    floats c = add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
    /* 0 0 2 2 | 1 1 3 3: two lanes of each are left */
    __m128 low = _mm256_castps256_ps128(c), high = _mm256_extractf128_ps(c, 1);
    __m128 all = _mm_add_ps(_mm_shuffle_ps(low, high, 0x88), _mm_shuffle_ps(low, high, 0xdd));
    all = _mm_shuffle_ps(all, all, 0xd8); /* 0 2 1 3 -> 0 1 2 3 */
    _mm_storel_pi((__m64 *)products, all);
    _mm_storeh_pi((__m64 *)squares, all);
}

#include "scale_sums_template.h"
