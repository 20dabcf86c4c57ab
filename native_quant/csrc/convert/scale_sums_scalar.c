/* The definition in C: section 2b of numerics.md, a value at a time. */
#include <math.h>

#include "bf16.h"
#include "kernels.h"

void kt_scale_sums_scalar(const kt_scale_search *search, float *products, float *squares) {
    for (int64_t c = 0; c < search->k; c++) {
        uint16_t x = kt_load16(search->row + 2 * c) & KT_BF16_MAGNITUDE;
        search->units[c] = x & KT_BF16_INFINITY ? kt_from_bf16(x) * search->reciprocal : 0.0f;
    }
    for (int i = 0; i < KT_CANDIDATES; i++) {
        float product[KT_SUM_LANES] = {0}, square[KT_SUM_LANES] = {0};
        for (int64_t c = 0; c < search->k; c++) {
            float u = search->units[c], h = search->weights ? search->weights[c] : 1.0f;
            float q = fmaf(u, search->ratios[i], KT_ROUND) - KT_ROUND;
            q = q < search->largest ? q : search->largest;
            product[c % KT_SUM_LANES] = fmaf(h * u, q, product[c % KT_SUM_LANES]);
            square[c % KT_SUM_LANES] = fmaf(h * q, q, square[c % KT_SUM_LANES]);
        }
        products[i] = kt_add_lanes(product);
        squares[i] = kt_add_lanes(square);
    }
}
