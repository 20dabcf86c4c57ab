/* Codes of 4, 5, 6 and 8 bits to int16. */
#include "code_at.h"

void kt_chunk_int16_scalar(int bits, int has_sign, const uint8_t *codes, const uint8_t *scales, int64_t columns,
                           int16_t *chunk) {
    for (int64_t i = 0; i < columns * KT_PANEL_ROWS; i++) {
        int code = kt_code_at(bits, codes, i);
        if (bits == 4 && has_sign && code > 7) code -= 16;
        chunk[i] = (int16_t)(scales ? code * (int8_t)scales[kt_scale_at(i)] : code);
    }
}
