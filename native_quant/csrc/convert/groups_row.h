/* The scale of a group, for every kernel of the family and the search. numerics.md, sections 6 and 6b. */
#ifndef KT_GROUPS_ROW_H
#define KT_GROUPS_ROW_H

#include "bf16.h"
#include "kernels.h"

/* The scale of a group of zeros, or of one whose scale rounds to zero: the distance of 1 to the next BF16. */
#define KT_EMPTY_SCALE 0x1p-7f

/* The value of largest magnitude: the negative one of two. */
static inline uint16_t kt_group_largest(const uint8_t *row, int64_t group) {
    uint16_t amax = kt_amax_scalar(row, group);
    for (int64_t c = 0; c < group; c++)
        if (kt_load16(row + 2 * c) == (amax | KT_BF16_SIGN)) return amax | KT_BF16_SIGN;
    return amax;
}

/* largest: the value of largest magnitude; its sign counts only for KTQ_SIGNED. */
static inline uint16_t kt_group_scale(int bits, int rounding, uint16_t largest) {
    float magnitude = kt_from_bf16(largest & KT_BF16_MAGNITUDE);
    uint16_t scale = rounding == KTQ_SIGNED ? kt_to_bf16(kt_from_bf16(largest) / -8.0f)
                                            : kt_to_bf16(magnitude / (bits == 4 ? 7.5f : 127.5f));
    return scale & KT_BF16_MAGNITUDE ? scale : kt_to_bf16(KT_EMPTY_SCALE);
}

#endif
