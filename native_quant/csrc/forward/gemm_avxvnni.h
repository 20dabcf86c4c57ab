/* vpdpbusd: four unsigned by four signed bytes, added to an int32, in one instruction. Weights are the unsigned ones. A
 * file that includes this must define TWO_STREAMS: whether a block fetches both halves of its share of what comes next
 * at the same time. */
#ifndef KT_GEMM_AVXVNNI_H
#define KT_GEMM_AVXVNNI_H

#include "arch/x86/dpbusd256.h"
#include "gemm_avx2.h"

/* What kt_fetch_next does, but in turn from `ahead` on and from `half` bytes after it. */
KT_INLINE void fetch_halves(int quad, const uint8_t **ahead, int64_t half, int64_t step) {
    if (quad % 2) return;
    _mm_prefetch((const char *)*ahead + quad % 4 / 2 * half, _MM_HINT_T1);
    if (quad % 4) *ahead += step;
}

KT_INLINE KT_TARGET_AVXVNNI void block(int tokens, const uint8_t *codes, int64_t columns, const int8_t *a, int32_t *c,
                                       const uint8_t *ahead, int64_t step) {
    for (int h = 0; h < 2; h++, c += KT_HALF_ROWS) {
        __m256i sum[KT_FEW][2];
#pragma GCC unroll 6
        for (int t = 0; t < tokens; t++)
            for (int v = 0; v < 2; v++) sum[t][v] = kt_load(c + t * KT_STRIP_ROWS + v * 8);
        const uint8_t *at = codes + h * KT_HALF_BYTES;
        for (int64_t j = 0; j < columns; j += 32, at += j % 64 ? 512 : KT_TILE_BYTES - 512) {
#pragma GCC unroll 8
            for (int q = 0; q < 8; q++) {
                __m256i low = kt_load(at + q * 64), high = kt_load(at + q * 64 + 32);
                if (TWO_STREAMS) fetch_halves(q, &ahead, columns / 8 * step, step);
                else kt_fetch_next(q, &ahead, step);
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
            for (int v = 0; v < 2; v++) kt_store(c + t * KT_STRIP_ROWS + v * 8, sum[t][v]);
    }
}

#endif
