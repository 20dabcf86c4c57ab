/* The scale of a group, for every kernel of the family. NUMERICS.md, section 6. */
#ifndef KT_GROUPS_ROW_H
#define KT_GROUPS_ROW_H

#include "bf16.h"
#include "kernels.h"

/* What a group of zeros gets, or one whose scale rounds to zero: the distance of 1 to the next BF16. */
#define KT_EMPTY_SCALE 0x1p-7f

/* largest: the value of largest magnitude; its sign counts for KTQ_SIGNED alone. */
static inline uint16_t kt_group_scale(int bits, int rounding, uint16_t largest) {
    float magnitude = kt_from_bf16(largest & KT_BF16_MAGNITUDE);
    uint16_t scale = rounding == KTQ_SIGNED ? kt_to_bf16(kt_from_bf16(largest) / -8.0f)
                                            : kt_to_bf16(magnitude / (bits == 4 ? 7.5f : 127.5f));
    return scale & KT_BF16_MAGNITUDE ? scale : kt_to_bf16(KT_EMPTY_SCALE);
}

#endif
