/* AVX2: a half tile of AMXINT4, 8 rows and two times 32 columns at a time (pack_avx2.h). The caller guarantees that no
 * x * reciprocal leaves -112..112, and that subnormal values do not matter in these rows. */
#include "pack_avx2.h"

/* From the INT8 grid to multiples of 16, half away from zero: floor((q + 8) / 16) for q >= 0 and floor((q + 7) / 16)
   below, so the code is the upper nibble of this. */
KT_TARGET_AVX2 static inline __m256i upper_nibbles(__m256i q8) {
    __m256i less_one_if_negative = _mm256_cmpgt_epi8(_mm256_setzero_si256(), q8);
    return _mm256_add_epi8(_mm256_add_epi8(q8, _mm256_set1_epi8(8)), less_one_if_negative);
}

/* 32 bytes: the codes of columns c..c+31 below, those of c+64..c+95 above. */
KT_TARGET_AVX2 static inline __m256i nibble_pairs(const uint8_t *bf16, __m256 reciprocal) {
    const __m256i low_nibble = _mm256_set1_epi8(0x0f);
    __m256i low = _mm256_srli_epi16(upper_nibbles(kt_int8_codes(bf16, reciprocal)), 4);
    __m256i high = upper_nibbles(kt_int8_codes(bf16 + 128, reciprocal));
    return _mm256_or_si256(_mm256_and_si256(low_nibble, low), _mm256_andnot_si256(low_nibble, high));
}

KT_TARGET_AVX2 void kt_pack_int4_avx2(const uint8_t *rows, int64_t row_stride, int64_t columns, const float *reciprocal,
                                      uint8_t *tiles, const kt_ahead *ahead) {
    for (int64_t c = 0; c < columns; c += 128, tiles += KT_TILE_BYTES) {
        for (int first = 0; first < KT_HALF_ROWS; first += 8) {
            __m256i left[8], right[8];
            for (int r = 0; r < 8; r++) {
                const uint8_t *row = rows + (first + r) * row_stride + 2 * c;
                __m256 factor = _mm256_set1_ps(reciprocal[first + r]);
                left[r] = nibble_pairs(row, factor);
                right[r] = nibble_pairs(row + 64, factor);
                kt_fetch(ahead, first + r, c, 128);
            }
            kt_store_quads(left, 0, tiles + 4 * first);
            kt_store_quads(right, 0, tiles + 4 * first + 8 * 64);
        }
    }
}
