/* AVX-512 F and BW: a half tile is 16 registers of 64 bytes, transposed (words_avx512.h). */
#include "pack_avx512.h"

/* The bytes that are not in -most..most. */
KT_TARGET_AVX512 static inline __mmask64 outside(__m512i codes, __m512i most) {
    return _mm512_cmpgt_epu8_mask(_mm512_add_epi8(codes, most), _mm512_add_epi8(most, most));
}

KT_TARGET_AVX512 int kt_pack_codes_avx512(int bits, const int8_t *rows, int64_t row_stride, int64_t columns,
                                          uint8_t *tiles, const kt_ahead *ahead) {
    const __m512i most = _mm512_set1_epi8((char)kt_largest_code(bits)), low_nibble = _mm512_set1_epi8(0x0f);
    int64_t tile_columns = kt_geometry_of(bits)->tile_columns;
    __mmask64 bad = 0;
    for (int64_t c = 0; c < columns; c += tile_columns, tiles += KT_TILE_BYTES) {
        __m512i bytes[KT_HALF_ROWS], quads[16];
        for (int r = 0; r < KT_HALF_ROWS; r++) {
            const int8_t *row = rows + r * row_stride + c;
            bytes[r] = _mm512_loadu_si512(row);
            bad |= outside(bytes[r], most);
            if (bits == 4) {
                __m512i high = _mm512_loadu_si512(row + 64);
                bad |= outside(high, most);
                /* 0xca: where the mask has a bit its second operand, else the third. */
                bytes[r] = _mm512_ternarylogic_epi32(low_nibble, bytes[r], _mm512_slli_epi16(high, 4), 0xca);
            }
            kt_fetch(ahead, r, c, tile_columns);
        }
        kt_transpose_words(bytes, quads);
        for (int quad = 0; quad < 16; quad++) _mm512_storeu_si512(tiles + 64 * quad, quads[quad]);
    }
    return !bad;
}
