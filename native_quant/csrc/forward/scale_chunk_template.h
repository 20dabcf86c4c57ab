/* A chunk times the scales of groups of 16 columns: a pair of columns of a vector of rows at a time, of which each 32
 * bits hold the two of a row. */
#include "bf16_template.h"

TARGET void KERNEL_OF(scale_chunk)(const uint16_t *scales, int64_t columns, uint16_t *chunk) {
    enum { VECTORS = KT_HALF_ROWS / LANES };
    for (int64_t half = 0; half < columns / 16; half++)
        for (int group = 0; group < 2; group++) {
            const uint16_t *row_scales = scales + (half / 2 * 2 + group) * KT_PANEL_ROWS + half % 2 * KT_HALF_ROWS;
            floats scale[VECTORS];
            for (int v = 0; v < VECTORS; v++)
                scale[v] = castsi_ps(slli_epi32(load_epu16_epi32(row_scales + v * LANES), 16));
            for (int i = 0; i < 8 * VECTORS; i++, chunk += 2 * LANES) {
                ints both = load_si(chunk);
                floats first = mul_ps(castsi_ps(slli_epi32(both, 16)), scale[i % VECTORS]);
                floats second = mul_ps(upper_half(both), scale[i % VECTORS]);
                store_si(chunk, or_si(srli_epi32(castps_si(first), 16), castps_si(second)));
            }
        }
}
