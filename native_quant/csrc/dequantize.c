/* The way back, and how far it is from the source. Plain C: the converter only samples with it. */
#include "bf16.h"
#include "kernels.h"

enum { TILE_COLUMNS_MAX = 128, LANES = 8 };

static int64_t tile_columns(int bits) {
    return bits == 8 ? 64 : 128;
}

/* The tile that holds row r and the columns from c on (FORMAT.md): row blocks, then column blocks, then strips, then tiles. */
static const uint8_t *tile_at(int bits, int64_t k, const uint8_t *weight, int64_t r, int64_t c) {
    int64_t block_rows = bits == 8 ? 64 : 128;
    int64_t row_block = r / block_rows * block_rows, column_block = c / KT_K_BLOCK * KT_K_BLOCK;
    int64_t columns = k - column_block < KT_K_BLOCK ? k - column_block : KT_K_BLOCK;
    int64_t strip = (r - row_block) / KT_STRIP_ROWS * KT_STRIP_ROWS;
    int64_t element = row_block * k + column_block * block_rows + strip * columns + (c - column_block) * KT_STRIP_ROWS;
    return weight + element * bits / 8;
}

/* One row of a tile as it is multiplied by the scale: INT8 codes, or 16 times the INT4 codes. */
static void unpack_tile_row(int bits, const uint8_t *tile, int64_t r, int8_t *codes) {
    const uint8_t *row = tile + r % KT_STRIP_ROWS / KT_HALF_ROWS * KT_HALF_BYTES + r % KT_HALF_ROWS * 4;
    for (int64_t j = 0; j < 64; j++) {
        uint8_t byte = row[j / 4 * 64 + j % 4];
        if (bits == 8) {
            codes[j] = (int8_t)byte;
        } else {
            codes[j] = (int8_t)(uint8_t)(byte << 4);
            codes[j + 64] = (int8_t)(byte & 0xf0);
        }
    }
}

int ktq_dequantize(int bits, int64_t n, int64_t k, const uint8_t *weight, const float *scale, float *out) {
    int error = kt_check_shape(bits, n, k);
    if (!error && (!weight || !scale || !out)) error = KTQ_EINVAL;
    if (error) return error;

    unsigned state = kt_enter();
    int8_t codes[TILE_COLUMNS_MAX];
    for (int64_t r = 0; r < n; r++) {
        for (int64_t first = 0; first < k; first += tile_columns(bits)) {
            unpack_tile_row(bits, tile_at(bits, k, weight, r, first), r, codes);
            for (int64_t j = 0; j < tile_columns(bits); j++) out[r * k + first + j] = (float)codes[j] * scale[r];
        }
    }
    kt_leave(state);
    return KTQ_OK;
}

/* Sums of one row, each in 8 lanes (column mod 8) that are added in order at the end: one order, whoever computes it. */
static void row_sums(int bits, int64_t k, const uint8_t *source, const uint8_t *weight, int64_t r, float scale, double *sums) {
    double xx[LANES] = {0}, yy[LANES] = {0}, xy[LANES] = {0}, dd[LANES] = {0};
    int8_t codes[TILE_COLUMNS_MAX];
    for (int64_t first = 0; first < k; first += tile_columns(bits)) {
        unpack_tile_row(bits, tile_at(bits, k, weight, r, first), r, codes);
        for (int64_t j = 0; j < tile_columns(bits); j += LANES) {
            for (int lane = 0; lane < LANES; lane++) {
                double x = kt_from_bf16(kt_load16(source + 2 * (first + j + lane)));
                double y = (float)codes[j + lane] * scale;
                xx[lane] += x * x;
                yy[lane] += y * y;
                xy[lane] += x * y;
                dd[lane] += (x - y) * (x - y);
            }
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
    unsigned state = kt_enter();
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
