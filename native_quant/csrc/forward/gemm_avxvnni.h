/* vpdpbusd: four unsigned by four signed bytes, added to an int32, in one instruction. Weights are the unsigned ones: a
 * flipped sign bit adds half of what their bits hold. A file that includes this must define
 *
 *     BITS         8 or 4
 *     TWO_STREAMS  whether a block prefetches both halves of its share of the next tiles at the same time */
#ifndef KT_GEMM_AVXVNNI_H
#define KT_GEMM_AVXVNNI_H

#include "arch/x86/dpbusd256.h"
#include "gemm_avx2.h"

enum { AHEAD = 4096, PARTS = 1 };

/* 32 bytes of a tile as codes; INT4: of its columns 0..63, or of those from 64 on. */
KT_INLINE KT_TARGET_AVXVNNI __m256i get_codes(__m256i bytes, int from_64) {
    if (BITS == 8) return _mm256_xor_si256(bytes, _mm256_set1_epi8(-128));
    bytes = _mm256_xor_si256(bytes, _mm256_set1_epi8((char)0x88));
    return from_64 ? kt_high(bytes) : kt_low(bytes);
}

KT_INLINE KT_TARGET_AVXVNNI void part_few(int tokens, const uint8_t *tile, const int8_t *a, int32_t *c) {
    const int vectors = tokens <= 2 ? 4 : 2; /* vectors of 8 rows at a time: enough sums to hide the latency */
#pragma GCC unroll 1
    for (int first = 0; first < 4; first += vectors) {
        const uint8_t *codes = kt_base(tile + first * (KT_HALF_BYTES / 2));
        __m256i sum[KT_FEW][4];
#pragma GCC unroll 6
        for (int t = 0; t < tokens; t++)
            for (int v = 0; v < vectors; v++) sum[t][v] = kt_load(c + t * KT_PANEL_ROWS + (first + v) * 8);
#pragma GCC unroll 1
        for (int part = 0; part < 4; part++, codes += 256)
#pragma GCC unroll 4
            for (int q = 0; q < 4; q++) {
                __m256i bytes[4];
                for (int v = 0; v < vectors; v++) {
                    const uint8_t *place = codes + v / 2 * KT_HALF_BYTES + q * 64 + v % 2 * 32;
                    if (v % 2 == 0) _mm_prefetch((const char *)place + AHEAD, _MM_HINT_T0);
                    bytes[v] = kt_load(place);
                }
                for (int n = 0; n < 8 / BITS; n++) {
                    __m256i code[4];
                    for (int v = 0; v < vectors; v++) code[v] = get_codes(bytes[v], n);
#pragma GCC unroll 6
                    for (int t = 0; t < tokens; t++) {
                        __m256i four = kt_four(a + t * KT_K_BLOCK + n * 64 + 16 * part + 4 * q);
                        for (int v = 0; v < vectors; v++) sum[t][v] = KT_DPBUSD256(sum[t][v], code[v], four);
                    }
                }
            }
#pragma GCC unroll 6
        for (int t = 0; t < tokens; t++)
            for (int v = 0; v < vectors; v++) kt_store(c + t * KT_PANEL_ROWS + (first + v) * 8, sum[t][v]);
    }
}

/* Like kt_fetch_next, but alternates between `prefetch` and `half` bytes after it. */
KT_INLINE void fetch_halves(int quad, const uint8_t **prefetch, int64_t half, int64_t step) {
    if (quad % 2) return;
    _mm_prefetch((const char *)*prefetch + quad % 4 / 2 * half, _MM_HINT_T1);
    if (quad % 4) *prefetch += step;
}

KT_INLINE KT_TARGET_AVXVNNI void block(int tokens, const uint8_t *codes, int64_t columns, const int8_t *a, int32_t *c,
                                       const uint8_t *prefetch, int64_t step) {
    for (int h = 0; h < 2; h++, c += KT_HALF_ROWS) {
        __m256i sum[KT_FEW][2];
#pragma GCC unroll 6
        for (int t = 0; t < tokens; t++)
            for (int v = 0; v < 2; v++) sum[t][v] = kt_load(c + t * KT_PANEL_ROWS + v * 8);
        const uint8_t *at = codes + h * KT_HALF_BYTES;
        for (int64_t j = 0; j < columns; j += 32, at += j % 64 ? 512 : KT_TILE_BYTES - 512) {
#pragma GCC unroll 8
            for (int q = 0; q < 8; q++) {
                __m256i low = kt_load(at + q * 64), high = kt_load(at + q * 64 + 32);
                if (TWO_STREAMS) fetch_halves(q, &prefetch, columns / 8 * step, step);
                else kt_fetch_next(q, &prefetch, step);
#pragma GCC unroll 6
                for (int t = 0; t < tokens; t++) {
                    __m256i four = kt_four(a + t * KT_CHUNK_PITCH + j + 4 * q);
                    sum[t][0] = KT_DPBUSD256(sum[t][0], low, four);
                    sum[t][1] = KT_DPBUSD256(sum[t][1], high, four);
                }
            }
        }
#pragma GCC unroll 6
        for (int t = 0; t < tokens; t++)
            for (int v = 0; v < 2; v++) kt_store(c + t * KT_PANEL_ROWS + v * 8, sum[t][v]);
    }
}

KT_TARGET_AVXVNNI static inline void unpack_int8(const uint8_t *tiles, int64_t columns, uint8_t *codes) {
    for (int64_t i = 0; i < columns * KT_PANEL_ROWS; i += 32) kt_store(codes + i, get_codes(kt_load(tiles + i), 0));
}

KT_DEFINE_ALL(KT_TARGET_AVXVNNI, 512 / BITS)
static const kt_gemm_steps steps = {
    BITS, 1 << (BITS - 1), 512, KT_ALL(few), BITS == 8 ? unpack_int8 : kt_unpack_int4, kt_copy_bytes, KT_ALL(block),
};

#endif
