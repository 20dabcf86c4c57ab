/* AVX-512 F and BW: a half tile of AMXINT4 is 16 registers of 64 bytes, each the codes of two times 64 columns,
 * transposed (pack_avx512.h). The caller guarantees that no x * reciprocal leaves -112..112, and that subnormal values
 * do not matter. */
#include "pack_avx512.h"

/* From the INT8 grid to multiples of 16, half away from zero: floor((q + 8) / 16) for q >= 0 and floor((q + 7) / 16)
   below, so the code is the upper nibble of this. */
KT_TARGET_AVX512 static inline __m512i upper_nibbles(__m512i q8) {
    __m512i sum = _mm512_add_epi8(q8, _mm512_set1_epi8(8));
    return _mm512_mask_add_epi8(sum, _mm512_movepi8_mask(q8), q8, _mm512_set1_epi8(7));
}

KT_TARGET_AVX512 void kt_pack_int4_avx512(const uint8_t *rows, int64_t row_stride, int64_t columns,
                                          const float *reciprocal, uint8_t *tiles, const kt_ahead *ahead) {
    const __m512i low_nibble = _mm512_set1_epi8(0x0f);
    for (int64_t c = 0; c < columns; c += 128, tiles += KT_TILE_BYTES) {
        __m512i codes[KT_HALF_ROWS];
        for (int r = 0; r < KT_HALF_ROWS; r++) {
            const uint8_t *row = rows + r * row_stride + 2 * c;
            __m512i low = upper_nibbles(kt_int8_codes(row, reciprocal[r]));
            __m512i high = upper_nibbles(kt_int8_codes(row + 128, reciprocal[r]));
            /* 0xca: where the mask has a bit its second operand, else the third. */
            codes[r] = _mm512_ternarylogic_epi32(low_nibble, _mm512_srli_epi16(low, 4), high, 0xca);
            kt_fetch(ahead, r, c, 128);
        }
        kt_store_quads(codes, tiles);
    }
}
