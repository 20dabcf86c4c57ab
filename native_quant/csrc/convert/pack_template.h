/* Shared by the packers: BF16 values to INT8 codes, and where the quads of rows go.
 *
 * A half tile is 16 rows of 16 quads (a quad: 4 bytes, of 4 consecutive columns). It is stored by quads:
 *
 *         quad 0  quad 1 .. quad 15                row 0  row 1 .. row 15
 *   row 0   .       .         .            quad 0    .      .        .       <- 64 bytes
 *   row 1   .       .         .      ->    quad 1    .      .        .
 *   ..                                     ..
 *
 * so a vector of as many quads of each of as many rows is transposed. packs_epi16 works within 128 bits, so a vector of
 * its codes holds its quads in the order 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15 (or, of 32 bytes, 0 1 4 5, 2 3 6 7).
 * That costs nothing: each is stored where it belongs.
 *
 * Stores are plain: the output buffer is used again and again and stays in the cache. Non-temporal ones were measured:
 * slower on Cascade Lake by a fifth into such a buffer, and no faster into fresh memory.
 */
#ifndef KT_PACK_TEMPLATE_H
#define KT_PACK_TEMPLATE_H

#include "kernels.h"

/* Vectors that hold the 64 bytes of a row of a half tile. */
enum { SIDES = 64 / VECTOR_BYTES };

/* round-half-to-even(fl32(x * reciprocal)) of a vector of BF16 values: int16, in their order.
 *
 *   32-bit lane of BF16      odd column | even column
 *   << 16                    even       | 0             = the even column as float32
 *   & 0xffff0000             odd        | 0             = the odd column as float32
 *   * reciprocal, + 1.5 * 2^23                          the integer is in the lower 16 bits of each
 *   odd << 16, blend         odd code   | even code
 */
TARGET static inline ints kt_int16_codes(const uint8_t *p, floats reciprocal) {
    const floats magic = set1_ps(0x1.8p23f);
    ints bf16 = loadu_si(p);
    floats even = castsi_ps(slli_epi32(bf16, 16)), odd = castsi_ps(and_si(bf16, set1_epi32(0xffff0000)));
    even = add_ps(mul_ps(even, reciprocal), magic);
    odd = add_ps(mul_ps(odd, reciprocal), magic);
    return odd_epi16(slli_epi32(castps_si(odd), 16), castps_si(even));
}

/* Two vectors of BF16 values: their codes, quads in the order of packs_epi16. */
TARGET static inline ints kt_int8_codes(const uint8_t *bf16, floats reciprocal) {
    return packs_epi16(kt_int16_codes(bf16, reciprocal), kt_int16_codes(bf16 + VECTOR_BYTES, reciprocal));
}

/* Stores LANES rows of quads, which are in order or in that of packs_epi16, at half + 64 * quad. */
TARGET static inline void kt_store_quads(const ints *rows, int in_order, uint8_t *half) {
    ints quads[LANES];
    transpose_words(rows, quads);
    for (int i = 0; i < LANES; i++) {
        /* packs_epi16: the first quad of 128 bits number l is 2l, the third LANES/2 more. */
        int packed = i / 4 * 2 + i % 2 + i % 4 / 2 * (LANES / 2);
        storeu_si(half + 64 * (in_order ? i : packed), quads[i]);
    }
}

/* Prefetches `columns` columns from `column` on of row r of the 16 rows that come next, so that memory is busy while we
   compute: a fifth faster. Always inline, because GCC 12 removes calls of a function that only prefetches. */
TARGET static inline __attribute__((always_inline)) void kt_prefetch_columns(const kt_prefetch *prefetch, int64_t r,
                                                                            int64_t column, int64_t columns) {
    const char *at = (const char *)prefetch->first + r * prefetch->row_stride + (column * prefetch->column_bits >> 3);
    int64_t bytes = columns * prefetch->column_bits >> 3;
    for (int64_t done = 0; done < bytes; done += 64) FETCH_AHEAD(at + done);
}

/* kt_pack_fn. get_codes: a vector of bytes of a row, from its BF16 values and its reciprocal. */
TARGET static inline __attribute__((always_inline)) void
kt_pack_tiles(int bits, ints get_codes(const uint8_t *, floats), const uint8_t *rows, int64_t row_stride,
              int64_t columns, const float *reciprocal, uint8_t *tiles, const kt_prefetch *prefetch) {
    const int64_t tile_columns = 512 / bits;
    for (int64_t c = 0; c < columns; c += tile_columns, tiles += KT_TILE_BYTES)
        for (int first = 0; first < KT_HALF_ROWS; first += LANES) {
            ints codes[SIDES][LANES];
            for (int r = 0; r < LANES; r++) {
                const uint8_t *row = rows + (first + r) * row_stride + 2 * c;
                floats factor = set1_ps(reciprocal[first + r]);
                for (int side = 0; side < SIDES; side++)
                    codes[side][r] = get_codes(row + 2 * VECTOR_BYTES * side, factor);
                kt_prefetch_columns(prefetch, first + r, c, tile_columns);
            }
            for (int side = 0; side < SIDES; side++) kt_store_quads(codes[side], 0, tiles + 4 * first + 512 * side);
        }
}

#endif
