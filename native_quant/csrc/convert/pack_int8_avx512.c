/* AVX-512 F and BW: a half tile of AMXINT8 is 16 registers of 64 codes, transposed (pack_avx512.h). The caller
 * guarantees that no x * reciprocal leaves -127..127, and that subnormal values do not matter in these rows. */
#include "pack_avx512.h"

KT_TARGET_AVX512 void kt_pack_int8_avx512(const uint8_t *rows, int64_t row_stride, int64_t columns,
                                          const float *reciprocal, uint8_t *tiles, const kt_ahead *ahead) {
    for (int64_t c = 0; c < columns; c += 64, tiles += KT_TILE_BYTES) {
        __m512i codes[KT_HALF_ROWS];
        for (int r = 0; r < KT_HALF_ROWS; r++) {
            codes[r] = kt_int8_codes(rows + r * row_stride + 2 * c, reciprocal[r]);
            kt_fetch(ahead, r, c, 64);
        }
        kt_store_quads(codes, tiles);
    }
}
