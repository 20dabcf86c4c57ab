/* The definition in C: section 6 of numerics.md, a value at a time. */
#include <math.h>

#include "groups_row.h"

static unsigned code(int bits, int rounding, float x, float scale) {
    float least = bits == 4 ? -8.0f : -128.0f;
    float q = x / scale;
    if (rounding == KTQ_LIBRARY) q = kt_from_bf16(kt_to_bf16(q));
    q = q < least ? least : q > -least - 1.0f ? -least - 1.0f : q;
    return (unsigned)(int)(rintf(q) - least);
}

int kt_groups_scalar(int bits, int64_t group, int rounding, const uint8_t *row, int64_t k, uint8_t *packed,
                     uint16_t *scale) {
    for (int64_t first = 0; first < k; first += group) {
        uint16_t largest = kt_group_largest(row + 2 * first, group);
        if ((largest & KT_BF16_MAGNITUDE) >= KT_BF16_INFINITY) return 0;
        float d = kt_from_bf16(*scale++ = kt_group_scale(bits, rounding, largest));
        for (int64_t c = first; c < first + group; c += 8 / bits) {
            unsigned byte = code(bits, rounding, kt_from_bf16(kt_load16(row + 2 * c)), d);
            if (bits == 4) byte |= code(bits, rounding, kt_from_bf16(kt_load16(row + 2 * c + 2)), d) << 4;
            *packed++ = (uint8_t)byte;
        }
    }
    return 1;
}
