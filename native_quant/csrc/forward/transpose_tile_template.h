/* The transpose of a tile of BF16, in blocks of as many 2 x 2 numbers as make a vector of them, 64 bits each. */
#include "kernels.h"

TARGET void KERNEL_OF(transpose_tile)(const uint8_t *tile, uint8_t *out) {
    enum { ITEMS = LANES / 2 };
    const ints pair_order = load_repeated(((const uint8_t[]){0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15}));
    for (int quarter = 0; quarter < 4; quarter++) {
        const uint8_t *in = tile + quarter * (KT_HALF_BYTES / 2);
        uint8_t *to = out + (quarter % 2 * 2 + quarter / 2) * (KT_HALF_BYTES / 2);
        for (int line = 0; line < 8; line += ITEMS)
            for (int item = 0; item < 8; item += ITEMS) {
                ints items[ITEMS], transposed[ITEMS];
                for (int i = 0; i < ITEMS; i++)
                    items[i] = shuffle_epi8(loadu_si(in + (line + i) * 64 + item * 8), pair_order);
                transpose_double_words(items, transposed);
                for (int i = 0; i < ITEMS; i++) storeu_si(to + (item + i) * 64 + line * 8, transposed[i]);
            }
    }
}
