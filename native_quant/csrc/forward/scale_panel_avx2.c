/* A panel times the scales of groups of 16 columns, AVX2: a pair of columns of 8 rows at a time, of which each 32 bits
 * hold the two of a row. */
#include <immintrin.h>

#include "kernels.h"

KT_TARGET_AVX2 void kt_scale_panel_avx2(const uint16_t *scales, int64_t columns, uint16_t *panel) {
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
    for (int64_t half = 0; half < columns / 16; half++)
        for (int group = 0; group < 2; group++) {
            const uint16_t *of_rows = scales + (half / 2 * 2 + group) * KT_STRIP_ROWS + half % 2 * KT_HALF_ROWS;
            __m256 scale[2];
            for (int v = 0; v < 2; v++) {
                __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(of_rows + v * 8)));
                scale[v] = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
            }
            for (int i = 0; i < 16; i++, panel += 16) {
                __m256i both = _mm256_load_si256((const __m256i *)panel);
                __m256 first = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)), scale[i % 2]);
                __m256 second = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_and_si256(both, upper)), scale[i % 2]);
                __m256i low = _mm256_srli_epi32(_mm256_castps_si256(first), 16);
                _mm256_store_si256((__m256i *)panel, _mm256_or_si256(low, _mm256_castps_si256(second)));
            }
        }
}
