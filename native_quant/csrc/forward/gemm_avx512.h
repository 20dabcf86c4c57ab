/* Shared by the dot products of AVX-512 and AMX. */
#ifndef KT_GEMM_AVX512_H
#define KT_GEMM_AVX512_H

#include <immintrin.h>

#include "kernels.h"

#define KT_INLINE static inline __attribute__((always_inline))

KT_INLINE int64_t kt_least(int64_t x, int64_t y) {
    return x < y ? x : y;
}

/* The tiles of a panel's columns from `first` on, a multiple of 128. */
static inline const uint8_t *kt_chunk_tiles(const kt_gemm *job, int bits, int64_t panel, int64_t first) {
    int64_t in_block = first % KT_K_BLOCK;
    return kt_panel_tiles(bits, &job->panel[panel], job->k, first - in_block) + in_block * KT_PANEL_ROWS * bits / 8;
}

#endif
