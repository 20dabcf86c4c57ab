/* The loop: 16 rows at a time are decoded (if they need it), measured, quantized and packed while they are in L2.
 * Knows the order of the tiles and the formula of the scales, but no instruction set. */
#include <stddef.h>

#include "kernels.h"
#include "quantize_scalar.h"

/* A subnormal x counts as 0, and is below 2^-126: x/d rounds to 0 anyway once d > 2^-125. Below that, with a margin,
   the scalar kernel looks at each x. */
#define SUBNORMALS_MATTER 0x1p-120f

/* 16 rows as BF16, evenly spaced, and what quantizing them takes. */
typedef struct {
    const uint8_t *rows;
    int64_t row_stride;
    float reciprocal[KT_HALF_ROWS];
    int subnormals_matter;
} half_tile;

/* Decodes (if need be) and measures rows first..first+15. Returns the first that is not finite, or -1. */
static int64_t measure_rows(const kt_kernels *kernels, int bits, const ktq_source *source, int64_t first, int64_t k,
                            uint16_t *scratch, float *scale, half_tile *half) {
    half->subnormals_matter = 0;
    for (int r = 0; r < KT_HALF_ROWS; r++) {
        const uint8_t *row = kt_bf16_row(kernels, source, first + r, k, scratch);
        if (r == 0) half->rows = row;
        if (r == 1) half->row_stride = row - half->rows;
        uint16_t amax = kernels->amax(row, k);
        if (amax >= KT_BF16_INFINITY) return first + r;
        float d = scale[first + r] = kt_row_scale(bits, amax);
        half->reciprocal[r] = d != 0.0f ? 1.0f / d : 0.0f;
        half->subnormals_matter |= d != 0.0f && d < SUBNORMALS_MATTER;
    }
    return -1;
}

/* 16 rows to their half tiles. */
static void pack(kt_pack_fn *kernel, int bits, int64_t first, int64_t k, const half_tile *half, uint8_t *weight,
                 const kt_prefetch *prefetch) {
    for (int64_t c = 0; c < k; c += KT_K_BLOCK) {
        int64_t columns = k - c < KT_K_BLOCK ? k - c : KT_K_BLOCK;
        kt_prefetch block = {prefetch->first + c * prefetch->column_bits / 8, prefetch->row_stride,
                             prefetch->column_bits};
        kernel(half->rows + 2 * c, half->row_stride, columns, half->reciprocal,
               kt_half_tiles(bits, weight, k, first, c), &block);
    }
}

int ktq_quantize_pack(int bits, int64_t n, int64_t k, const ktq_source *source, uint16_t *scratch, uint8_t *weight,
                      float *scale, int64_t *bad_row) {
    int error = kt_check_shape(bits, n, k);
    if (!error) error = source && scratch && weight && scale && bad_row ? kt_check_source(source, n, k) : KTQ_EINVAL;
    if (error) return error;

    const kt_kernels *kernels = kt_current();
    kt_pack_fn *best = bits == 8 ? kernels->pack_int8 : kernels->pack_int4;
    kt_pack_fn *scalar = bits == 8 ? kt_pack_int8_scalar : kt_pack_int4_scalar;
    kt_fp_state state = kt_enter();
    *bad_row = -1;
    for (int64_t first = 0; first < n; first += KT_HALF_ROWS) {
        half_tile half;
        *bad_row = measure_rows(kernels, bits, source, first, k, scratch, scale, &half);
        if (*bad_row >= 0) break;
        kt_prefetch prefetch = {half.rows, 0, 0};
        if (kt_is_row_contiguous(source) && first + KT_HALF_ROWS < n) {
            prefetch.first = (const uint8_t *)source->values + (first + KT_HALF_ROWS) * source->row_stride;
            prefetch.row_stride = source->row_stride;
            prefetch.column_bits = kt_column_bits(source->kind);
        }
        pack(half.subnormals_matter ? scalar : best, bits, first, k, &half, weight, &prefetch);
    }
    kt_leave(state);
    return *bad_row < 0 ? KTQ_OK : KTQ_ENONFINITE;
}
