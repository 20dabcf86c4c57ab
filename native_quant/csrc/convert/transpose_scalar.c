/* A panel whose columns are contiguous becomes one whose rows are. */
#include <string.h>

#include "kernels.h"

void kt_transpose_scalar(int item_bytes, const uint8_t *in, int64_t column_stride, int64_t rows, int64_t columns,
                         uint8_t *out, int64_t row_pitch) {
    for (int64_t c = 0; c < columns; c++)
        for (int64_t r = 0; r < rows; r++)
            memcpy(out + r * row_pitch + c * item_bytes, in + c * column_stride + r * item_bytes, (size_t)item_bytes);
}
