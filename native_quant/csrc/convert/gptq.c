/* A block of columns of GPTQ: 32 rows at a time are transposed, so that a column is a few vectors, processed while they
 * are in L1 and L2, and transposed back. Knows the order of rows, but no instruction set. */
#include <string.h>

#include "kernels.h"

/* Rows of `width` float32 -> tile[c][r]; lanes without a row are 0. */
static void turn(const kt_kernels *kernels, const float *rows, int64_t count, int64_t width, float *tile) {
    if (count < KT_PANEL_ROWS) memset(tile, 0, (size_t)(width * KT_PANEL_ROWS) * sizeof *tile);
    for (int64_t c = 0; c < width; c += KT_PANEL_ROWS) {
        int64_t columns = width - c < KT_PANEL_ROWS ? width - c : KT_PANEL_ROWS;
        /* To the kernel, the columns are rows, and the rows that are far apart columns. */
        kernels->transpose(4, (const uint8_t *)(rows + c), width * 4, columns, count,
                           (uint8_t *)(tile + c * KT_PANEL_ROWS), KT_PANEL_ROWS * 4);
    }
}

static void turn_back(const kt_kernels *kernels, const float *tile, int64_t count, int64_t width, float *rows) {
    kernels->transpose(4, (const uint8_t *)tile, KT_PANEL_ROWS * 4, count, width, (uint8_t *)rows, width * 4);
}

int ktq_gptq_block(int least, int most, int precision, int kind, int64_t n, int64_t width, const float *inverse,
                   const float *scale, float *weight, float *value, float *error) {
    if (least < INT8_MIN || least > 0 || most < 0 || most > INT8_MAX || precision < 0 || precision > 7) return KTQ_EINVAL;
    if ((kind != KTQ_BF16 && kind != KTQ_F32) || n < 1) return KTQ_EINVAL;
    if (width < 1 || width > KTQ_GPTQ_COLUMNS || !inverse || !scale || !weight || !value || !error) return KTQ_EINVAL;

    _Alignas(64) float tiles[3][KTQ_GPTQ_COLUMNS * KT_PANEL_ROWS];
    const kt_gptq job = {{least, most, precision}, kind == KTQ_BF16, width, inverse, tiles[0], tiles[1], tiles[2]};
    const kt_kernels *kernels = kt_current();
    kt_fp_state state = kt_enter();
    for (int64_t first = 0; first < n; first += KT_PANEL_ROWS) {
        int64_t count = n - first < KT_PANEL_ROWS ? n - first : KT_PANEL_ROWS, at = first * width;
        turn(kernels, weight + at, count, width, job.weight);
        turn(kernels, scale + at, count, width, job.scale);
        kernels->gptq(&job);
        turn_back(kernels, job.weight, count, width, weight + at);
        turn_back(kernels, job.scale, count, width, value + at);
        turn_back(kernels, job.error, count, width, error + at);
    }
    kt_leave(state);
    return KTQ_OK;
}
