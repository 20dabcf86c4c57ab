/* The scale of a group, for every kernel of the family. NUMERICS.md, section 6. */
#ifndef KT_GROUPS_ROW_H
#define KT_GROUPS_ROW_H

#include "bf16.h"
#include "kernels.h"

/* What a group of zeros gets, or one whose scale rounds to zero: the distance of 1 to the next BF16. */
#define KT_EMPTY_SCALE 0x1p-7f

static inline uint16_t kt_group_scale(int bits, uint16_t amax) {
    uint16_t scale = kt_to_bf16(kt_from_bf16(amax) / (bits == 4 ? 7.5f : 127.5f));
    return scale ? scale : kt_to_bf16(KT_EMPTY_SCALE);
}

#endif
