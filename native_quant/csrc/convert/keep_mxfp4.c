/* Sources that have the numbers of MXFP4, E2M1 codes with an E8M0 scale for each 32 columns: codes and exponents stay,
 * and only their order changes. */
#include "bf16.h"
#include "ggml_blocks.h"
#include "kernels.h"
#include "panels.h"

enum { ROW_BYTES = KT_GROUP_COLUMNS / 2, NO_EXPONENT = 256 };

int kt_has_mxfp4(const ktq_source *source) {
    if (source->kind == KTQ_GGML_MXFP4) return source->skip % KT_GROUP_COLUMNS == 0;
    return source->kind == KTQ_FP4_E2M1 && source->skip % 2 == 0 && source->block_columns == KT_GROUP_COLUMNS &&
           source->first_column % KT_GROUP_COLUMNS == 0;
}

/* Returns e for a float32 scale that is 2^(e-127), else NO_EXPONENT. */
static int read_exponent(float scale) {
    uint32_t bits = kt_bits(scale);
    if (bits == 0x400000) return 0; /* 2^-127, subnormal */
    return bits & 0x807fffff || bits == 0 ? NO_EXPONENT : (int)(bits >> 23);
}

/* Whether 16 bytes of codes with this exponent are numbers, and finite: 6 * 2^126, 4 * 2^126 and 2 * 2^127 are not. */
static int are_finite(const uint8_t *codes, int e) {
    int largest = e < 253 ? 7 : e == 253 ? 5 : e == 254 ? 3 : -1;
    for (int i = 0; i < ROW_BYTES; i++)
        if ((codes[i] & 7) > largest || (codes[i] >> 4 & 7) > largest) return 0;
    return 1;
}

/* The exponents of a row, KT_PANEL_ROWS apart. Returns 1, or 0 if a number is not finite, or NO_EXPONENT. */
static int reorder_exponents(const ktq_source *source, int64_t r, const uint8_t *row, int64_t block_bytes,
                             int64_t blocks, uint8_t *exponents) {
    int finite = 1, in_blocks = source->kind == KTQ_GGML_MXFP4;
    const float *scales = NULL;
    if (!in_blocks)
        scales = source->scales + (source->first_row + r) / source->block_rows * source->scales_per_row +
                 source->first_column / KT_GROUP_COLUMNS;
    for (int64_t b = 0; b < blocks; b++, row += block_bytes) {
        int e = in_blocks ? *row : read_exponent(scales[b]);
        if (e == NO_EXPONENT) return NO_EXPONENT;
        if (e >= 253) finite &= are_finite(row + in_blocks, e);
        exponents[b * KT_PANEL_ROWS] = (uint8_t)e;
    }
    return finite;
}

/* Brings a row nearer that is read soon: the rows of a checkpoint come from memory. */
static void fetch(const uint8_t *row, int64_t bytes) {
    for (int64_t done = 0; done < bytes; done += 64) __builtin_prefetch(row + done, 0, 2);
}

int kt_keep_mxfp4(const kt_kernels *kernels, const ktq_source *source, int64_t n, int64_t k, uint8_t *codes,
                  uint8_t *exponents, int64_t *bad_row) {
    int64_t block_bytes = source->kind == KTQ_GGML_MXFP4 ? (int64_t)sizeof(kt_ggml_mxfp4) : ROW_BYTES;
    int64_t blocks = k / KT_GROUP_COLUMNS, first_block = source->skip * block_bytes / KT_GROUP_COLUMNS;
    const uint8_t *rows = (const uint8_t *)source->values + first_block;
    for (int64_t r = 0; r < n; r++, rows += source->row_stride) {
        if (r + KT_HALF_ROWS < n) fetch(rows + KT_HALF_ROWS * source->row_stride, blocks * block_bytes);
        int done = reorder_exponents(source, r, rows, block_bytes, blocks, exponents + r % KT_PANEL_ROWS);
        if (done == NO_EXPONENT) return 0;
        if (!done && *bad_row < 0) *bad_row = r;
        if (r % KT_HALF_ROWS == 0)
            kernels->reorder_mxfp4(source->kind, rows, source->row_stride, blocks,
                               codes + r % KT_PANEL_ROWS / KT_HALF_ROWS * KT_MXFP4_HALF_BYTES);
        if (r % KT_PANEL_ROWS == KT_PANEL_ROWS - 1) {
            codes += KT_PANEL_ROWS * k / 2;
            exponents += k;
        }
    }
    return 1;
}
