/* The code shared by the 256-bit kernels for dot products. A register holds 8 rows x 4 columns of codes, 8 sums, or 4
 * activations 8 times. A file that includes this must define
 *
 *     AHEAD  bytes between a code that is multiplied and one that is prefetched, for a panel that is read once
 *     PARTS  parts of a tile, 1 or 2 halves, that are read from each of two panels in turn */
#ifndef KT_GEMM_AVX2_H
#define KT_GEMM_AVX2_H

#include <immintrin.h>
#include <string.h>

#include "gemm_steps.h"

KT_INLINE KT_TARGET_AVX2 __m256i kt_load(const void *p) {
    return _mm256_loadu_si256((const __m256i *)p);
}

KT_INLINE KT_TARGET_AVX2 void kt_store(void *p, __m256i x) {
    _mm256_storeu_si256((__m256i *)p, x);
}

KT_INLINE KT_TARGET_AVX2 __m256i kt_four(const int8_t *a) {
    int32_t four;
    memcpy(&four, a, 4);
    return _mm256_set1_epi32(four);
}

/* Returns p, hidden from the compiler, so that GCC 12 addresses nearby data with offsets instead of a register for
 * each. */
KT_INLINE const uint8_t *kt_base(const uint8_t *p) {
    __asm__("" : "+r"(p));
    return p;
}

/* Prefetches one line into L2 with every other quad, and advances. */
KT_INLINE void kt_fetch_next(int quad, const uint8_t **prefetch, int64_t step) {
    if (quad % 2) return;
    _mm_prefetch((const char *)*prefetch, _MM_HINT_T1);
    *prefetch += step;
}

/* Returns sum + x, and prevents reordering: in unrolled loops GCC 12 postpones additions and runs out of registers. */
KT_INLINE KT_TARGET_AVX2 __m256i kt_add16(__m256i sum, __m256i x) {
    sum = _mm256_add_epi16(sum, x);
    __asm__("" : "+x"(sum));
    return sum;
}

KT_INLINE KT_TARGET_AVX2 __m256i kt_add32(__m256i sum, __m256i x) {
    sum = _mm256_add_epi32(sum, x);
    __asm__("" : "+x"(sum));
    return sum;
}

/* A byte of two 4-bit codes, each + 8: unsigned. */
KT_INLINE KT_TARGET_AVX2 __m256i kt_unsigned_pair(const uint8_t *p) {
    return _mm256_xor_si256(kt_load(p), _mm256_set1_epi8((char)0x88));
}

KT_INLINE KT_TARGET_AVX2 __m256i kt_low(__m256i pair) {
    return _mm256_and_si256(pair, _mm256_set1_epi8(15));
}

KT_INLINE KT_TARGET_AVX2 __m256i kt_high(__m256i pair) {
    return kt_low(_mm256_srli_epi16(pair, 4));
}

/* Half tiles of 128 columns to two half tiles of 64, code + 8 in each byte. */
KT_TARGET_AVX2 static inline void kt_unpack_int4(const uint8_t *tiles, int64_t columns, uint8_t *codes) {
    for (int64_t j = 0; j < columns; j += 128, tiles += KT_TILE_BYTES, codes += 2 * KT_TILE_BYTES)
        for (int i = 0; i < KT_TILE_BYTES; i += 32) {
            __m256i pair = kt_unsigned_pair(tiles + i);
            kt_store(codes + i, kt_low(pair));
            kt_store(codes + KT_TILE_BYTES + i, kt_high(pair));
        }
}

KT_TARGET_AVX2 static inline void kt_copy_bytes(const int8_t *a, int64_t columns, int8_t *out) {
    for (int64_t j = 0; j < columns; j += 32) kt_store(out + j, kt_load(a + j));
}

/* Defines the functions of both tables: few, and block from an inline function as in kt_block_fn, which takes the number
   of tokens first. */
#define KT_DEFINE_BLOCK(N, TARGET)                                                                                     \
    TARGET KT_ON_A_LINE static void block_##N(const uint8_t *codes, int64_t columns, const int8_t *a, int32_t *c,      \
                                              const uint8_t *prefetch, int64_t step) {                                 \
        block(N, codes, columns, a, c, prefetch, step);                                                                \
    }
#define KT_DEFINE_ALL(TARGET, TILE_COLUMNS)                                                                            \
    KT_DEFINE_ALL_FEW(TARGET, TILE_COLUMNS)                                                                            \
    KT_DEFINE_BLOCK(1, TARGET)                                                                                         \
    KT_DEFINE_BLOCK(2, TARGET) KT_DEFINE_BLOCK(3, TARGET) KT_DEFINE_BLOCK(4, TARGET) KT_DEFINE_BLOCK(5, TARGET)        \
        KT_DEFINE_BLOCK(6, TARGET)

#endif
