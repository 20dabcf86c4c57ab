/* The way back, and how far it is from the source. Plain C: the converter only samples with it. */
#include <stddef.h>

#include "bf16.h"
#include "kernels.h"

enum { TILE_COLUMNS_MAX = 128, LANES = 8 };

/* The tiles of row r, in the column block that begins at c. */
static const uint8_t *tiles_at(int bits, int64_t k, const uint8_t *weight, int64_t r, int64_t c) {
    kt_panel panel = kt_get_panel(bits, weight, k, r / KT_PANEL_ROWS);
    return kt_panel_tiles(bits, &panel, k, c);
}

/* One row of a tile as it is multiplied by the scale: INT8 codes, or 16 times the INT4 codes. */
static void unpack_tile_row(int bits, const uint8_t *tile, int64_t r, int8_t *codes) {
    const uint8_t *row = tile + r % KT_PANEL_ROWS / KT_HALF_ROWS * KT_HALF_BYTES + r % KT_HALF_ROWS * 4;
    for (int64_t quad = 0; quad < 16; quad++) {
        uint32_t bytes;
        memcpy(&bytes, row + quad * 64, sizeof bytes);
        uint32_t low = bits == 8 ? bytes : bytes << 4 & 0xf0f0f0f0, high = bytes & 0xf0f0f0f0;
        memcpy(codes + quad * 4, &low, sizeof low);
        if (bits == 4) memcpy(codes + quad * 4 + 64, &high, sizeof high);
    }
}

int ktq_dequantize(int bits, int64_t n, int64_t k, const uint8_t *weight, const float *scale, float *out) {
    int error = kt_check_shape(bits, n, k);
    if (!error && (!weight || !scale || !out)) error = KTQ_EINVAL;
    if (error) return error;

    kt_fp_state state = kt_enter();
    int8_t codes[TILE_COLUMNS_MAX];
    int64_t tile_columns = kt_get_geometry(bits)->tile_columns;
    for (int64_t r = 0; r < n; r++) {
        const uint8_t *tile = NULL;
        for (int64_t first = 0; first < k; first += tile_columns, tile += KT_TILE_BYTES) {
            if (first % KT_K_BLOCK == 0) tile = tiles_at(bits, k, weight, r, first);
            unpack_tile_row(bits, tile, r, codes);
            for (int64_t j = 0; j < tile_columns; j++) out[r * k + first + j] = (float)codes[j] * scale[r];
        }
    }
    kt_leave(state);
    return KTQ_OK;
}

/* 8 lanes of each type; the compiler makes them of whatever it has. Rounding does not depend on that, nor does the
 * order. */
typedef int8_t codes_lanes __attribute__((vector_size(8)));
typedef uint16_t bf16_lanes __attribute__((vector_size(16)));
typedef uint32_t bits_lanes __attribute__((vector_size(32)));
typedef float float_lanes __attribute__((vector_size(32)));
typedef double double_lanes __attribute__((vector_size(64)));

/* Sums of one row, each in 8 lanes (column mod 8) that are added in order at the end: the same order in every kernel.
 */
static void row_sums(int bits, int64_t k, const uint8_t *source, const uint8_t *weight, int64_t r, float scale,
                     double *sums) {
    double_lanes xx = {0}, yy = {0}, xy = {0}, dd = {0};
    int8_t codes[TILE_COLUMNS_MAX];
    int64_t tile_columns = kt_get_geometry(bits)->tile_columns;
    const uint8_t *tile = NULL;
    for (int64_t first = 0; first < k; first += tile_columns, tile += KT_TILE_BYTES) {
        if (first % KT_K_BLOCK == 0) tile = tiles_at(bits, k, weight, r, first);
        unpack_tile_row(bits, tile, r, codes);
        for (int64_t j = 0; j < tile_columns; j += LANES) {
            bf16_lanes bf16;
            codes_lanes q;
            memcpy(&bf16, source + 2 * (first + j), sizeof bf16);
            memcpy(&q, codes + j, sizeof q);
            double_lanes x =
                __builtin_convertvector((float_lanes)(__builtin_convertvector(bf16, bits_lanes) << 16), double_lanes);
            double_lanes y = __builtin_convertvector(__builtin_convertvector(q, float_lanes) * scale, double_lanes);
            double_lanes d = x - y;
            xx += x * x;
            yy += y * y;
            xy += x * y;
            dd += d * d;
        }
    }
    for (int lane = 0; lane < LANES; lane++) {
        sums[0] += xx[lane];
        sums[1] += yy[lane];
        sums[2] += xy[lane];
        sums[3] += dd[lane];
    }
}

int ktq_error_sums(int bits, int64_t n, int64_t k, const ktq_source *source, uint16_t *scratch, const uint8_t *weight,
                   const float *scale, double *sums) {
    int error = kt_check_shape(bits, n, k);
    if (!error) error = source && weight && scale && sums ? kt_check_source(source, n, k) : KTQ_EINVAL;
    if (error) return error;
    if (!scratch) return KTQ_EINVAL;

    const kt_kernels *kernels = kt_current();
    kt_fp_state state = kt_enter();
    for (int i = 0; i < 4; i++) sums[i] = 0.0;
    for (int64_t r = 0; r < n; r++) {
        const uint8_t *row = kt_bf16_row(kernels, source, r, k, scratch);
        double row_sum[4] = {0};
        row_sums(bits, k, row, weight, r, scale[r], row_sum);
        for (int i = 0; i < 4; i++) sums[i] += row_sum[i];
    }
    kt_leave(state);
    return KTQ_OK;
}
