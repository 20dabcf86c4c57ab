/* The definition in C: section 2e of numerics.md, a value at a time. */
#include <math.h>

#include "kernels.h"

void kt_outer_sums_scalar(int64_t count, const float *vectors, const float *panel, float *sums) {
    for (int64_t i = 0; i < count; i++)
        for (int v = 0; v < KT_TOGETHER; v++)
            for (int l = 0; l < KT_SUM_LANES; l++) {
                float *sum = sums + v * KT_SUM_LANES + l;
                *sum = fmaf(vectors[i * KT_TOGETHER + v], panel[i * KT_SUM_LANES + l], *sum);
            }
}
