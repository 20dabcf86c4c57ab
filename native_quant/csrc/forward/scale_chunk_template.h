/* A chunk times the scales of groups of 16 columns: a pair of columns of a vector of rows at a time, of which each 32
 * bits hold the two of a row. */
#include "bf16_template.h"

enum { VECTORS = KT_HALF_ROWS / LANES };

/* BF16 in the upper halves. */
TARGET static inline ints product(int exact, ints x, floats scale) {
    floats y = mul_ps(castsi_ps(x), scale);
    return exact ? castps_si(y) : bf16_above_of_numbers(y);
}

__attribute__((always_inline)) TARGET static inline void scale_in(int exact, const uint16_t *scales, int64_t columns,
                                                                  uint16_t *chunk) {
    const ints above = set1_epi32(0xffff0000);
    for (int64_t half = 0; half < columns / 16; half++)
        for (int group = 0; group < 2; group++) {
            const uint16_t *of_rows = scales + (half / 2 * 2 + group) * KT_PANEL_ROWS + half % 2 * KT_HALF_ROWS;
            floats scale[VECTORS];
            for (int v = 0; v < VECTORS; v++)
                scale[v] = castsi_ps(slli_epi32(load_epu16_epi32(of_rows + v * LANES), 16));
            for (int i = 0; i < 8 * VECTORS; i++, chunk += 2 * LANES) {
                ints both = load_si(chunk);
                ints first = product(exact, slli_epi32(both, 16), scale[i % VECTORS]);
                ints second = product(exact, and_si(both, above), scale[i % VECTORS]);
                store_si(chunk, where_bits(above, second, srli_epi32(first, 16)));
            }
        }
}

TARGET void KERNEL_OF(scale_chunk)(int exact, const uint16_t *scales, int64_t columns, uint16_t *chunk) {
    if (exact) scale_in(1, scales, columns, chunk);
    else scale_in(0, scales, columns, chunk);
}
