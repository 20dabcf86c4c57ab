/* The strip loop: 32 rows at a time are decoded (if they need it), measured, quantized and packed while they lie in L2.
 * Knows the order of the tiles and the formula of the scales; knows no instruction set. */
#include <stddef.h>

#include "bf16.h"
#include "kernels.h"

/* The smallest normal float32; a scale below it is flushed to 0, as kt-kernel does (it runs with FTZ and DAZ on). */
#define SMALLEST_NORMAL 0x1p-126f
/* A subnormal x counts as 0, and is below 2^-126: x/d rounds to 0 anyway once d > 2^-125. Below that, with a margin, the
   scalar kernel looks at each x. */
#define SUBNORMALS_MATTER 0x1p-120f

int kt_check_shape(int bits, int64_t n, int64_t k) {
    if ((bits != 4 && bits != 8) || n <= 0 || k <= 0) return KTQ_EINVAL;
    int64_t multiple = bits == 4 ? 128 : 64;
    return n % multiple || k % multiple ? KTQ_ESHAPE : KTQ_OK;
}

/* NUMERICS.md: INT8 multiplies by fl(1/127) (kt-kernel's compiler made that of a division), INT4 divides in float64. */
static float scale_of(int bits, uint16_t amax_bits) {
    float amax = kt_from_bf16(amax_bits);
    float scale = bits == 8 ? amax * (1.0f / 127.0f) : (float)((double)amax / 112.0);
    return scale < SMALLEST_NORMAL ? 0.0f : scale;
}

/* 16 rows: scales, then all their half tiles. strip: 32-row strip's place in a column block = strip_bytes * (first column).
   Returns the first row that is not finite, or 16. */
static int quantize_half(const kt_kernels *kernels, int bits, int64_t k, const uint8_t *rows, int64_t row_stride, float *scale,
                         uint8_t *row_block, int64_t row_block_rows, int64_t row_in_block, const uint8_t *ahead) {
    float reciprocal[KT_HALF_ROWS];
    int careful = 0;
    for (int r = 0; r < KT_HALF_ROWS; r++) {
        uint16_t amax = kernels->amax(rows + r * row_stride, k);
        if (amax >= KT_BF16_INFINITY) return r;
        scale[r] = scale_of(bits, amax);
        reciprocal[r] = scale[r] != 0.0f ? 1.0f / scale[r] : 0.0f;
        careful |= scale[r] != 0.0f && scale[r] < SUBNORMALS_MATTER;
    }
    kt_pack_fn *pack = bits == 8 ? kernels->pack_int8 : kernels->pack_int4;
    if (careful) pack = bits == 8 ? kt_pack_int8_scalar : kt_pack_int4_scalar;

    int64_t strip = row_in_block / KT_STRIP_ROWS * KT_STRIP_ROWS, half = row_in_block % KT_STRIP_ROWS / KT_HALF_ROWS;
    for (int64_t first = 0; first < k; first += KT_K_BLOCK) {
        int64_t columns = k - first < KT_K_BLOCK ? k - first : KT_K_BLOCK;
        int64_t element = first * row_block_rows + strip * columns; /* of the row block: column blocks, then strips */
        pack(rows + first * 2, row_stride, columns, reciprocal, row_block + element * bits / 8 + half * KT_HALF_BYTES,
             ahead ? ahead + first * 2 : NULL, row_stride);
    }
    return KT_HALF_ROWS;
}

int ktq_quantize_pack(int bits, int64_t n, int64_t k, const ktq_source *source, uint16_t *scratch, uint8_t *weight,
                      float *scale, int64_t *bad_row) {
    int error = kt_check_shape(bits, n, k);
    if (!error) error = source && weight && scale && bad_row ? kt_check_source(source, n, k) : KTQ_EINVAL;
    if (error) return error;
    int plain = kt_is_plain_bf16(source);
    if (!plain && !scratch) return KTQ_EINVAL;

    const kt_kernels *kernels = kt_current();
    unsigned state = kt_enter();
    int64_t block_rows = bits == 8 ? 64 : 128;
    *bad_row = -1;
    for (int64_t first = 0; first < n && *bad_row < 0; first += KT_HALF_ROWS) {
        int in_scratch = (int)(first % KT_STRIP_ROWS);
        if (!plain && !in_scratch) kt_decode_strip(kernels, source, first, KT_STRIP_ROWS, k, scratch);
        int64_t stride = plain ? source->row_stride : k * 2;
        const uint8_t *rows = plain ? (const uint8_t *)source->values + first * stride : (const uint8_t *)(scratch + in_scratch * k);
        const uint8_t *ahead = plain && first + KT_HALF_ROWS < n ? rows + KT_HALF_ROWS * stride : NULL;
        int good = quantize_half(kernels, bits, k, rows, stride, scale + first, weight + first / block_rows * block_rows * k * bits / 8,
                                 block_rows, first % block_rows, ahead);
        if (good < KT_HALF_ROWS) *bad_row = first + good;
    }
    __builtin_ia32_sfence(); /* the kernels' non-temporal stores, before another thread reads them */
    kt_leave(state);
    return *bad_row < 0 ? KTQ_OK : KTQ_ENONFINITE;
}
