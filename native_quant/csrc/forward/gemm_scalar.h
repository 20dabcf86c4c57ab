/* Dot products as they are defined; the codes as bytes.md orders them. */
#ifndef KT_GEMM_SCALAR_H
#define KT_GEMM_SCALAR_H

#include "kernels.h"

/* Code (r, j) of a panel's column block: r < 32, j counted from the block's first column. */
static inline int kt_code(int bits, const uint8_t *tiles, int64_t r, int64_t j) {
    int64_t tile_columns = kt_get_geometry(bits)->tile_columns, in_tile = j % tile_columns;
    uint8_t byte =
        tiles[j / tile_columns * KT_TILE_BYTES + r / 16 * KT_HALF_BYTES + kt_half_byte_offset(r % 16, in_tile % 64)];
    if (bits == 8) return (int8_t)byte;
    return (int8_t)(in_tile < 64 ? byte << 4 : byte & 0xf0) >> 4;
}

static inline int kt_gemm_plain(int bits, const kt_gemm *job) {
    for (int64_t s = 0; s < job->panels; s++)
        for (int64_t t = 0; t < job->m; t++)
            for (int64_t r = 0; r < KT_PANEL_ROWS; r++) {
                int32_t sum = 0;
                for (int64_t first = 0; first < job->k; first += KT_K_BLOCK) {
                    const uint8_t *tiles = kt_panel_tiles(bits, &job->panel[s], job->k, first);
                    int64_t columns = job->k - first < KT_K_BLOCK ? job->k - first : KT_K_BLOCK;
                    const int8_t *a = job->a + kt_tile_offset(job->tile_rows, job->k, t);
                    for (int64_t j = 0; j < columns; j++)
                        sum += a[(first + j) / 64 * job->tile_rows * 64 + j % 64] * kt_code(bits, tiles, r, j);
                }
                job->c[s * job->c_pitch + t * KT_PANEL_ROWS + r] = sum;
            }
    return kt_get_geometry(bits)->unit;
}

#endif
