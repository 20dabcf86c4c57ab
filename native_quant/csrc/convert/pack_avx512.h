/* Shared by both AVX-512 packers: 64 BF16 values to 64 INT8 codes, and the transpose of a half tile.
 *
 * A half tile is 16 rows of 16 quads (a quad: 4 bytes, of 4 consecutive columns). It is stored by quads:
 *
 *         quad 0  quad 1 .. quad 15                row 0  row 1 .. row 15
 *   row 0   .       .         .            quad 0    .      .        .       <- 64 bytes
 *   row 1   .       .         .      ->    quad 1    .      .        .
 *   ..                                     ..
 *
 * vpacksswb works within 128-bit lanes, so a register of 64 codes holds its quads in the order 0 1 8 9, 2 3 10 11, 4 5
 * 12 13, 6 7 14 15. That costs nothing: the transpose stores each quad where it belongs.
 *
 * Stores are plain: the output buffer is used again and again and stays in the cache. Non-temporal ones were measured:
 * slower on Cascade Lake by a fifth into such a buffer, and no faster into fresh memory.
 */
#ifndef KT_PACK_AVX512_H
#define KT_PACK_AVX512_H

#include <immintrin.h>

#include "kernels.h"
#include "words_avx512.h"

/* round-half-to-even(fl32(x * reciprocal)) of 32 BF16 values: int16, in their order.
 *
 *   32-bit lane of BF16      odd column | even column
 *   << 16                    even       | 0             = the even column as float32
 *   & 0xffff0000             odd        | 0             = the odd column as float32
 *   * reciprocal, + 1.5 * 2^23                          the integer is in the lower 16 bits of each
 *   odd << 16, blend         odd code   | even code
 */
KT_TARGET_AVX512 static inline __m512i kt_int16_codes(__m512i bf16, __m512 reciprocal) {
    const __m512 magic = _mm512_set1_ps(0x1.8p23f);
    __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(bf16, 16));
    __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(bf16, _mm512_set1_epi32((int)0xffff0000)));
    even = _mm512_add_ps(_mm512_mul_ps(even, reciprocal), magic);
    odd = _mm512_add_ps(_mm512_mul_ps(odd, reciprocal), magic);
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_castps_si512(even),
                                   _mm512_slli_epi32(_mm512_castps_si512(odd), 16));
}

/* 64 columns of a row: 64 codes, quads in the order of vpacksswb. */
KT_TARGET_AVX512 static inline __m512i kt_int8_codes(const uint8_t *bf16, float reciprocal) {
    __m512 r = _mm512_set1_ps(reciprocal);
    return _mm512_packs_epi16(kt_int16_codes(_mm512_loadu_si512(bf16), r),
                              kt_int16_codes(_mm512_loadu_si512(bf16 + 64), r));
}

/* rows[16], quads in the order of vpacksswb -> the 1024 bytes of a half tile. */
KT_TARGET_AVX512 static inline void kt_store_quads(const __m512i *rows, uint8_t *half) {
    __m512i quads[16];
    kt_transpose_words(rows, quads);
    for (int lane = 0; lane < 4; lane++)
        for (int q = 0; q < 4; q++) { /* the first quad of lane l is 2l, the third 2l + 8 */
            int quad = 2 * lane + (q < 2 ? q : q + 6);
            _mm512_storeu_si512(half + 64 * quad, quads[4 * lane + q]);
        }
}

/* Prefetches `columns` columns from `column` on of row r of the 16 rows that come next, so that memory is busy while we
   compute: a fifth faster. Into L1, from where they move on to L2: prefetches into L2 alone are partly dropped while
   many are on their way (Emerald Rapids: 64 KiB that were all asked for came from L2 at a third of its speed). */
KT_TARGET_AVX512 static inline void kt_fetch(const kt_ahead *ahead, int64_t r, int64_t column, int64_t columns) {
    const char *at = (const char *)ahead->first + r * ahead->row_stride + (column * ahead->column_bits >> 3);
    int64_t bytes = columns * ahead->column_bits >> 3;
    for (int64_t done = 0; done < bytes; done += 64) _mm_prefetch(at + done, _MM_HINT_T0);
}

#endif
