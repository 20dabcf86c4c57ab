/* AVX-512: scale_sums_template.h. */
#include "vectors_avx512.h"

enum { AT_ONCE = 8 };

TARGET static inline void add_lanes(const floats *v, float *products, float *squares) {
    floats a[8], b[4], c[4];
    for (int i = 0; i < 8; i++)
        a[i] = add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x44),
                      _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xee));
    for (int i = 0; i < 4; i++)
        b[i] = add_ps(_mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x88),
                      _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xdd));
    for (int i = 0; i < 2; i++) {
        __m512d x = _mm512_castps_pd(b[2 * i]), y = _mm512_castps_pd(b[2 * i + 1]);
        c[i] = add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    floats sums = add_ps(_mm512_shuffle_ps(c[0], c[1], 0x88), _mm512_shuffle_ps(c[0], c[1], 0xdd));
    /* v[4 * i + j] is in lane 4 * j + i. */
    sums = _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), sums);
    _mm256_storeu_ps(products, _mm512_castps512_ps256(sums));
    _mm256_storeu_ps(squares, _mm512_extractf32x8_ps(sums, 1));
}

#include "scale_sums_template.h"
