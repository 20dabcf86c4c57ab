/* Codes of 5, 6 and 8 bits to BF16. */
#include "code_at.h"

void kt_chunk_integers_scalar(int bits, const uint8_t *codes, const uint16_t *scales, int64_t columns,
                              uint16_t *chunk) {
    for (int64_t i = 0; i < columns * KT_PANEL_ROWS; i++) {
        float scale = scales ? kt_from_bf16(scales[kt_scale_at(i)]) : 1;
        chunk[i] = kt_to_bf16((float)kt_code_at(bits, codes, i) * scale);
    }
}
