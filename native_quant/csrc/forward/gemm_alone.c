/* One kernel for products alone, for tests: what is arranged around it in a forward, and nothing else. */
#include <stdlib.h>
#include <string.h>

#include "moe.h"

int ktq_gemm(int bits, int64_t m, int64_t tiled_for, int64_t n, int64_t k, const int8_t *a, const uint8_t *weight,
             int32_t *c) {
    int error = kt_check_shape(bits, n, k);
    if (!error && (m < 1 || tiled_for < 1 || !a || !weight || !c)) error = KTQ_EINVAL;
    if (error) return error;
    const kt_kernels *kernels = kt_current();
    int64_t tile_rows = kernels->tiling(bits, tiled_for).rows, rows = kt_blocks(m, tile_rows) * tile_rows;
    int64_t blocks = kt_blocks(k, KT_K_BLOCK), strips = n / KT_STRIP_ROWS;
    int8_t *tiles = aligned_alloc(64, (size_t)(rows * k));
    int32_t *sums = calloc((size_t)(m * blocks), sizeof *sums);
    kt_strip *strip = calloc((size_t)strips, sizeof *strip);
    int32_t *out = aligned_alloc(64, (size_t)(strips * rows * KT_STRIP_ROWS) * sizeof *out);
    uint8_t *scratch = aligned_alloc(64, KT_GEMM_SCRATCH);
    if (tiles && sums && strip && out && scratch) {
        memset(tiles, 85, (size_t)(rows * k)); /* what lies behind the last token changes nothing */
        for (int64_t t = 0; t < m; t++)
            for (int64_t j = 0; j < k; j += 64)
                memcpy(tiles + kt_in_tiles(tile_rows, k, t) + j * tile_rows, a + t * k + j, 64);
        for (int64_t i = 0; i < m * k; i++) sums[i / k * blocks + i % k / KT_K_BLOCK] += a[i];
        for (int64_t s = 0; s < strips; s++) strip[s] = kt_strip_of(bits, weight, k, s);
        kt_gemm job = {.m = m,
                       .k = k,
                       .a = tiles,
                       .tile_rows = tile_rows,
                       .sums = sums,
                       .sums_pitch = blocks,
                       .strips = strips,
                       .strip = strip,
                       .c = out,
                       .c_pitch = rows * KT_STRIP_ROWS,
                       .next = weight,
                       .next_bytes = (k < KT_K_BLOCK ? k : KT_K_BLOCK) * KT_STRIP_ROWS * bits / 8,
                       .scratch = scratch};
        int unit = (bits == 8 ? kernels->gemm_int8 : kernels->gemm_int4)(&job);
        for (int64_t t = 0; t < m; t++)
            for (int64_t r = 0; r < n; r++) {
                int64_t sum = (int64_t)out[r / 32 * job.c_pitch + t * 32 + r % 32] * unit;
                c[t * n + r] = (int32_t)(sum / kt_geometry_of(bits)->unit);
            }
    } else {
        error = KTQ_ENOMEM;
    }
    free(tiles);
    free(sums);
    free(strip);
    free(out);
    free(scratch);
    return error;
}

int ktq_gemm_bf16(int number, int64_t m, int64_t n, int64_t k, const uint16_t *a, const void *codes,
                  const void *scales, float *c) {
    const kt_format *format = kt_format_of(number);
    if (!format || format->arithmetic != &kt_bf16_arithmetic || m < 1 || !a || !codes || !c) return KTQ_EINVAL;
    if (!scales && format->scale_bytes) return KTQ_EINVAL;
    int error = kt_check_size(format, n, k);
    if (error) return error;
    int64_t strips = n / KT_STRIP_ROWS;
    kt_bf16_strip *strip = calloc((size_t)strips, sizeof *strip);
    float *out = aligned_alloc(64, (size_t)(strips * m * KT_STRIP_ROWS) * sizeof *out);
    uint8_t *scratch = aligned_alloc(64, KT_GEMM_SCRATCH);
    if (strip && out && scratch) {
        kt_fp_state state = kt_enter_forward();
        for (int64_t s = 0; s < strips; s++) strip[s] = kt_bf16_strip_of(format, codes, scales, k, s);
        const kt_kernels *kernels = kt_current();
        kernels->gemm_bf16(&(kt_bf16_gemm){m, k, a, k, strips, strip, format->bits, kt_sum_columns(format),
                                           format->panel, kernels, out, m * KT_STRIP_ROWS, scratch});
        for (int64_t t = 0; t < m; t++)
            for (int64_t r = 0; r < n; r++) c[t * n + r] = out[(r / 32 * m + t) * 32 + r % 32];
        kt_leave(state);
    } else {
        error = KTQ_ENOMEM;
    }
    free(strip);
    free(out);
    free(scratch);
    return error;
}
