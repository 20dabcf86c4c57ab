/* MOE_INT8 and MOE_INT4 in the plain order: a row at a time is measured, divided and stored while it is in L1 or L2.
 * Knows the order of rows and the formula of the scales, but no instruction set. */
#include <stddef.h>

#include "kernels.h"
#include "quantize_scalar.h"

/* The scale of a row: that of AMXINT4, or the largest value divided by 127; AMXINT8 multiplies by fl(1/127). */
static float choose_scale(int bits, uint16_t amax) {
    float scale = bits == 8 ? kt_from_bf16(amax) / 127.0f : kt_row_scale(4, amax);
    return scale < KT_SMALLEST_NORMAL ? 0.0f : scale;
}

int ktq_quantize_plain(int bits, int64_t n, int64_t k, const ktq_source *source, uint16_t *scratch, uint8_t *weight,
                       float *scale, int64_t *bad_row) {
    int error = kt_check_shape(bits, n, k);
    if (!error) error = source && scratch && weight && scale && bad_row ? kt_check_source(source, n, k) : KTQ_EINVAL;
    if (error) return error;

    const kt_kernels *kernels = kt_current();
    const float unit = (float)kt_get_geometry(bits)->unit;
    kt_fp_state state = kt_enter();
    *bad_row = -1;
    for (int64_t first = 0; first < n && *bad_row < 0; first += KT_PANEL_ROWS) {
        int64_t row_stride;
        const uint8_t *row = kt_bf16_rows(kernels, source, first, KT_PANEL_ROWS, k, scratch, &row_stride);
        for (int64_t r = first; r < first + KT_PANEL_ROWS; r++, row += row_stride) {
            uint16_t amax = kernels->amax(row, k);
            if (amax >= KT_BF16_INFINITY) {
                *bad_row = r;
                break;
            }
            scale[r] = choose_scale(bits, amax);
            uint8_t *block = weight + r / KT_PLAIN_ROWS * KT_PLAIN_ROWS * k * bits / 8;
            kernels->plain_row(bits, row, k, unit * scale[r], block + r % KT_PLAIN_ROWS * KT_PLAIN_BYTES);
        }
    }
    kt_leave(state);
    return *bad_row < 0 ? KTQ_OK : KTQ_ENONFINITE;
}
