/* FP8 E4M3 to BF16, exactly. */
#include "kernels.h"

void kt_chunk_fp8_scalar(const uint8_t *codes, int64_t columns, uint16_t *chunk) {
    kt_decode_scalar(KTQ_FP8_E4M3, codes, 0, 1, columns * KT_PANEL_ROWS, 1, chunk, 0);
}
