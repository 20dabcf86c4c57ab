/* AVX2: a half tile of AMXINT8, 8 rows and 32 columns at a time (pack_avx2.h). The caller guarantees that no x *
 * reciprocal leaves -127..127, and that subnormal values do not matter in these rows. */
#include "pack_avx2.h"

KT_TARGET_AVX2 void kt_pack_int8_avx2(const uint8_t *rows, int64_t row_stride, int64_t columns, const float *reciprocal,
                                      uint8_t *tiles, const kt_ahead *ahead) {
    for (int64_t c = 0; c < columns; c += 64, tiles += KT_TILE_BYTES) {
        for (int first = 0; first < KT_HALF_ROWS; first += 8) {
            __m256i left[8], right[8];
            for (int r = 0; r < 8; r++) {
                const uint8_t *row = rows + (first + r) * row_stride + 2 * c;
                __m256 factor = _mm256_set1_ps(reciprocal[first + r]);
                left[r] = kt_int8_codes(row, factor);
                right[r] = kt_int8_codes(row + 64, factor);
                kt_fetch(ahead, first + r, c, 64);
            }
            kt_store_quads(left, 0, tiles + 4 * first);
            kt_store_quads(right, 0, tiles + 4 * first + 8 * 64);
        }
    }
}
