/* A panel times the scales of groups of 16 columns, AVX-512: a pair of columns of 16 rows at a time, of which each 32
 * bits hold the two of a row. */
#include <immintrin.h>

#include "kernels.h"

KT_TARGET_AVX512 void kt_scale_panel_avx512(const uint16_t *scales, int64_t columns, uint16_t *panel) {
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    for (int64_t half = 0; half < columns / 16; half++)
        for (int group = 0; group < 2; group++) {
            const uint16_t *of_rows = scales + (half / 2 * 2 + group) * KT_STRIP_ROWS + half % 2 * KT_HALF_ROWS;
            __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)of_rows));
            __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
            for (int pair = 0; pair < 8; pair++, panel += 32) {
                __m512i both = _mm512_load_si512(panel);
                __m512 first = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)), scale);
                __m512 second = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(both, upper)), scale);
                __m512i low = _mm512_srli_epi32(_mm512_castps_si512(first), 16);
                _mm512_store_si512(panel, _mm512_or_si512(low, _mm512_castps_si512(second)));
            }
        }
}
