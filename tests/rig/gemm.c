/* One kernel of products alone: what is arranged around it in a forward, and nothing else. `kernels` is the table of
 * the library that ships (ktq_kernels); what lies where, and how codes become chunks, is compiled from its sources. */
#define _GNU_SOURCE /* clock_gettime */
#include <stdlib.h>
#include <time.h>

#include "forward/moe.h"

const kt_arithmetic kt_int8_arithmetic, kt_bf16_arithmetic; /* which formats.c tells apart */
#include "forward/formats.c"

/* A job and the buffers that it points to. */
typedef struct {
    const kt_kernels *kernels;
    int bits;
    kt_gemm job;
    int8_t *tiles;
    int32_t *sums, *out;
    kt_panel *panel;
    uint8_t *scratch;
} alone;

static void release(alone *one) {
    free(one->tiles);
    free(one->sums);
    free(one->panel);
    free(one->out);
    free(one->scratch);
}

static int arrange(alone *one, const kt_kernels *kernels, int bits, int64_t m, int64_t tiled_for, int64_t n,
                   int64_t k, const int8_t *a) {
    int64_t tile_rows = kernels->tiling(bits, tiled_for).rows, rows = kt_ceil_divide(m, tile_rows) * tile_rows;
    int64_t blocks = kt_ceil_divide(k, KT_K_BLOCK), panels = n / KT_PANEL_ROWS;
    *one = (alone){.kernels = kernels,
                   .bits = bits,
                   .tiles = aligned_alloc(64, (size_t)(rows * k)),
                   .sums = calloc((size_t)(m * blocks), sizeof *one->sums),
                   .panel = calloc((size_t)panels, sizeof *one->panel),
                   .out = aligned_alloc(64, (size_t)(panels * rows * KT_PANEL_ROWS) * sizeof *one->out),
                   .scratch = aligned_alloc(64, KT_GEMM_SCRATCH)};
    if (!one->tiles || !one->sums || !one->panel || !one->out || !one->scratch) {
        release(one);
        return KTQ_ENOMEM;
    }
    memset(one->tiles, 85, (size_t)(rows * k)); /* what lies behind the last token changes nothing */
    for (int64_t t = 0; t < m; t++)
        for (int64_t j = 0; j < k; j += 64)
            memcpy(one->tiles + kt_tile_offset(tile_rows, k, t) + j * tile_rows, a + t * k + j, 64);
    for (int64_t i = 0; i < m * k; i++) one->sums[i / k * blocks + i % k / KT_K_BLOCK] += a[i];
    one->job = (kt_gemm){.m = m,
                         .k = k,
                         .a = one->tiles,
                         .tile_rows = tile_rows,
                         .sums = one->sums,
                         .sums_pitch = blocks,
                         .panels = panels,
                         .panel = one->panel,
                         .c = one->out,
                         .c_pitch = rows * KT_PANEL_ROWS,
                         .next_bytes = kt_first_block_bytes(bits, k),
                         .scratch = one->scratch};
    return KTQ_OK;
}

/* Returns the unit of the sums. */
static int multiply(alone *one, const uint8_t *weight, const uint8_t *next) {
    for (int64_t s = 0; s < one->job.panels; s++) one->panel[s] = kt_get_panel(one->bits, weight, one->job.k, s);
    one->job.next = next;
    return (one->bits == 8 ? one->kernels->gemm_int8 : one->kernels->gemm_int4)(&one->job);
}

/* c[m][n] = the dot products of a[m][k] (-127..127) with the codes of a packed weight [n, k]. The activations are laid
   out as the instruction set wants them for `tiled_for` tokens. */
int gemm(const kt_kernels *kernels, int bits, int64_t m, int64_t tiled_for, int64_t n, int64_t k, const int8_t *a,
         const uint8_t *weight, int32_t *c) {
    alone one;
    int error = arrange(&one, kernels, bits, m, tiled_for, n, k, a);
    if (error) return error;
    int unit = multiply(&one, weight, weight);
    for (int64_t t = 0; t < m; t++)
        for (int64_t r = 0; r < n; r++) {
            int64_t sum = (int64_t)one.out[r / 32 * one.job.c_pitch + t * 32 + r % 32] * unit;
            c[t * n + r] = (int32_t)(sum / kt_get_geometry(bits)->unit);
        }
    release(&one);
    return KTQ_OK;
}

/* The same with `count` weights one after the other: the seconds of the products alone, or a negative error. */
double time_gemm(const kt_kernels *kernels, int bits, int64_t m, int64_t tiled_for, int64_t n, int64_t k,
                 const int8_t *a, int64_t count, const uint8_t *weights) {
    alone one;
    struct timespec begun, ended;
    int error = arrange(&one, kernels, bits, m, tiled_for, n, k, a);
    if (error) return -error;
    int64_t size = n * k * bits / 8;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    for (int64_t i = 0; i < count; i++) multiply(&one, weights + i * size, weights + (i + 1) % count * size);
    clock_gettime(CLOCK_MONOTONIC, &ended);
    release(&one);
    return (double)(ended.tv_sec - begun.tv_sec) + (double)(ended.tv_nsec - begun.tv_nsec) * 1e-9;
}

/* gemm for BF16 arithmetic: a is BF16, c float32. scales: NULL for BF16. */
int gemm_bf16(const kt_kernels *kernels, int number, int int8, int64_t m, int64_t n, int64_t k, const uint16_t *a,
              const void *codes, const void *scales, float *c) {
    const kt_format *format = kt_get_format(number);
    int64_t panels = n / KT_PANEL_ROWS;
    int is_rounded = format && kt_rounds_activations(format) && !int8;
    kt_bf16_panel *panel = calloc((size_t)panels, sizeof *panel);
    float *out = aligned_alloc(64, (size_t)(panels * m * KT_PANEL_ROWS) * sizeof *out);
    uint8_t *scratch = aligned_alloc(64, KT_GEMM_SCRATCH);
    uint16_t *rounded = malloc((size_t)(m * k) * sizeof *rounded);
    float *sums = calloc((size_t)(m * k / KT_SUM_COLUMNS), sizeof *sums);
    int error = !panel || !out || !scratch || !sums || !rounded ? KTQ_ENOMEM : kt_check_size(format, n, k);
    if (!error) {
        kt_fp_state state = kt_enter_forward();
        if (int8) kernels->sum_units(m * k, a, sums);
        for (int64_t i = 0; !int8 && i < m * k; i++) sums[i / KT_SUM_COLUMNS] += kt_from_bf16(a[i]);
        memcpy(rounded, a, (size_t)(m * k) * sizeof *a);
        if (is_rounded) kernels->round_units(m * k, rounded);
        for (int64_t s = 0; s < panels; s++) panel[s] = kt_get_bf16_panel(format, codes, scales, k, s);
        (format->integers ? kernels->gemm_int16 : kernels->gemm_bf16)(
            &(kt_bf16_gemm){int8, is_rounded, m, k, rounded, k, panels, panel, sums, kernels, out, m * KT_PANEL_ROWS,
                            scratch});
        for (int64_t t = 0; t < m; t++)
            for (int64_t r = 0; r < n; r++) c[t * n + r] = out[(r / 32 * m + t) * 32 + r % 32];
        kt_leave(state);
    }
    free(panel);
    free(out);
    free(scratch);
    free(sums);
    free(rounded);
    return error;
}
