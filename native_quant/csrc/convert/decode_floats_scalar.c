/* FP8 and FP4 codes times a scale for each group of columns, to BF16: rounded once, from float32, to nearest even. */
#include "bf16.h"
#include "e2m1.h"
#include "kernels.h"

void kt_decode_floats_scalar(const kt_floats *row, uint16_t *out) {
    for (int64_t c = 0; c < row->columns; c++) {
        int64_t at = row->skip + c;
        float scale = row->scales[(row->first + c) / row->group];
        if (row->kind == KTQ_FP8_E4M3)
            kt_decode_scalar(row->kind, row->codes + at, 0, 1, 1, scale, out + c, 0);
        else
            out[c] = kt_to_bf16(kt_e2m1[row->codes[at / 2] >> at % 2 * 4 & 15] * scale);
    }
}
