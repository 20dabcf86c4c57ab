/* Packed integer codes less a zero point, times a scale for each group of columns, to BF16: rounded once, from float32,
 * to nearest even. */
#include "bf16.h"
#include "kernels.h"

void kt_decode_codes_scalar(const kt_codes *row, uint16_t *out) {
    for (int64_t c = 0; c < row->columns; c++) {
        int64_t at = row->skip + c, group = row->column_groups ? row->column_groups[c] : (row->first + c) / row->group;
        int code = row->bits == 8 ? row->codes[at] ^ row->flip : row->codes[at / 2] >> at % 2 * 4 & 15;
        out[c] = kt_to_bf16(((float)code - kt_zero_point(row, group)) * row->scales[group]);
    }
}
