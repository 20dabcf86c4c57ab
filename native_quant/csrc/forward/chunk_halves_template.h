/* FP16 as the sum of two BF16: the upper bits of a float32, and the rest, which has at most 3. */
#include "bf16_template.h"

TARGET void KERNEL_OF(chunk_halves)(const uint8_t *codes, int64_t columns, uint16_t *chunk) {
    uint16_t *rest = chunk + columns * KT_PANEL_ROWS;
    for (int64_t i = 0; i < columns * KT_PANEL_ROWS; i += 2 * LANES) {
        fetch(codes + KT_CHUNK_AHEAD + i);
        floats x = load_ph_ps(codes + 2 * i), y = load_ph_ps(codes + 2 * (i + LANES));
        storeu_si(chunk + i, kt_upper_halves(castps_si(x), castps_si(y)));
        x = sub_ps(x, upper_half(castps_si(x)));
        y = sub_ps(y, upper_half(castps_si(y)));
        storeu_si(rest + i, kt_upper_halves(castps_si(x), castps_si(y)));
    }
}
