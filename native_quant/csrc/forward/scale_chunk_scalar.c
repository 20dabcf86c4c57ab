/* A chunk times the scales of groups of 16 columns, exactly. */
#include "bf16.h"
#include "kernels.h"

void kt_scale_chunk_scalar(const uint16_t *scales, int64_t columns, uint16_t *chunk) {
    for (int64_t i = 0; i < columns * KT_PANEL_ROWS; i++) {
        int64_t half = i / (KT_HALF_BYTES / 2), group = half / 2 * 2 + i / 256 % 2; /* 8 pairs of columns of 16 rows */
        float scale = kt_from_bf16(scales[group * KT_PANEL_ROWS + half % 2 * KT_HALF_ROWS + i / 2 % KT_HALF_ROWS]);
        chunk[i] = (uint16_t)(kt_bits(kt_from_bf16(chunk[i]) * scale) >> 16);
    }
}
