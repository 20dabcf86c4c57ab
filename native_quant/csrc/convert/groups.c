/* Linears in groups of columns with one BF16 scale each: compressed-tensors' pack-quantized format. A row at a time is
 * measured, divided and packed while it is in L1 or L2. Knows the order of rows, but no instruction set. */
#include <stddef.h>

#include "kernels.h"

int ktq_quantize_groups(int bits, int64_t group, int rounding, int64_t n, int64_t k, const ktq_source *source,
                        uint16_t *scratch, uint8_t *packed, uint16_t *scale, int64_t *bad_row) {
    if ((bits != 4 && bits != 8) || rounding < KTQ_LIBRARY || rounding > KTQ_SIGNED) return KTQ_EINVAL;
    if (rounding == KTQ_SIGNED && bits != 4) return KTQ_EINVAL;
    if (group <= 0 || group % KT_GROUP_COLUMNS || !source || !scratch || !packed || !scale || !bad_row)
        return KTQ_EINVAL;
    int error = kt_check_source(source, n, k);
    if (!error && k % group) error = KTQ_EINVAL;
    if (error) return error;

    const kt_kernels *kernels = kt_current();
    kt_fp_state state = kt_enter();
    *bad_row = -1;
    for (int64_t first = 0; first < n && *bad_row < 0; first += KT_PANEL_ROWS) {
        int64_t rows = n - first < KT_PANEL_ROWS ? n - first : KT_PANEL_ROWS, row_stride;
        const uint8_t *row = kt_bf16_rows(kernels, source, first, rows, k, scratch, &row_stride);
        for (int64_t r = first; r < first + rows; r++, row += row_stride) {
            if (kernels->groups(bits, group, rounding, row, k, packed + r * (k * bits / 8), scale + r * (k / group)))
                continue;
            *bad_row = r;
            break;
        }
    }
    kt_leave(state);
    return *bad_row < 0 ? KTQ_OK : KTQ_ENONFINITE;
}
