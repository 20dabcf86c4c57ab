/* The largest magnitude of activations, in the vectors of a template. */
#ifndef KT_FIND_MOST_TEMPLATE_H
#define KT_FIND_MOST_TEMPLATE_H

#include "bf16.h"
#include "kernels.h"

enum { AT_ONCE = 2 * LANES }; /* numbers of 16 bits of a vector */

/* The largest magnitude of KT_SUM_COLUMNS activations. */
TARGET static inline uint32_t find_most(const uint16_t *a) {
    const ints magnitude = set1_epi16(KT_BF16_MAGNITUDE);
    ints most = and_si(loadu_si(a), magnitude);
    for (int i = AT_ONCE; i < KT_SUM_COLUMNS; i += AT_ONCE)
        most = max_epu16(most, and_si(loadu_si(a + i), magnitude));
    return reduce_max_epu16(most);
}

#endif
