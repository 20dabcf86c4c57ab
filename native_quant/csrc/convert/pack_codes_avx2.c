/* AVX2: half a half tile at a time, 8 rows of 32 bytes (pack_avx2.h). */
#include "pack_avx2.h"

/* 32 codes; *worst becomes the largest of code + most, as a byte without sign: in range it is at most 2 * most. */
KT_TARGET_AVX2 static inline __m256i load_codes(const int8_t *codes, __m256i most, __m256i *worst) {
    __m256i loaded = _mm256_loadu_si256((const __m256i *)codes);
    *worst = _mm256_max_epu8(*worst, _mm256_add_epi8(loaded, most));
    return loaded;
}

KT_TARGET_AVX2 int kt_pack_codes_avx2(int bits, const int8_t *rows, int64_t row_stride, int64_t columns, uint8_t *tiles,
                                      const kt_ahead *ahead) {
    const __m256i most = _mm256_set1_epi8((char)kt_largest_code(bits)), low_nibble = _mm256_set1_epi8(0x0f);
    int64_t tile_columns = kt_geometry_of(bits)->tile_columns;
    __m256i worst = _mm256_setzero_si256();
    for (int64_t c = 0; c < columns; c += tile_columns, tiles += KT_TILE_BYTES)
        for (int first = 0; first < KT_HALF_ROWS; first += 8) {
            __m256i bytes[2][8];
            for (int r = 0; r < 8; r++) {
                const int8_t *row = rows + (first + r) * row_stride + c;
                for (int side = 0; side < 2; side++) {
                    __m256i low = load_codes(row + 32 * side, most, &worst);
                    if (bits == 4) {
                        __m256i high = _mm256_slli_epi16(load_codes(row + 32 * side + 64, most, &worst), 4);
                        low = _mm256_or_si256(_mm256_and_si256(low_nibble, low), _mm256_andnot_si256(low_nibble, high));
                    }
                    bytes[side][r] = low;
                }
                kt_fetch(ahead, first + r, c, tile_columns);
            }
            for (int side = 0; side < 2; side++) kt_store_quads(bytes[side], 1, tiles + 4 * first + 8 * 64 * side);
        }
    __m256i twice = _mm256_add_epi8(most, most);
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(worst, twice), twice)) == -1;
}
