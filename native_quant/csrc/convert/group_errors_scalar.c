/* The definition in C: section 2d of numerics.md, a value at a time. */
#include "nearest_code.h"

void kt_group_errors_scalar(const kt_group_search *search, float *lanes, int8_t *codes) {
    for (int i = 0; i < search->count; i++, lanes += KT_SUM_LANES, codes += KT_SEARCHED_GROUP) {
        for (int l = 0; l < KT_SUM_LANES; l++) lanes[l] = 0.0f;
        for (int c = 0; c < KT_SEARCHED_GROUP; c++) {
            float x = kt_from_bf16(kt_load16(search->values + 2 * c)) * search->unit;
            float q = kt_nearest_code(x * search->reciprocals[i], &search->codes), d = x - q * search->scales[i];
            lanes[c % KT_SUM_LANES] = fmaf(search->weights[c] * d, d, lanes[c % KT_SUM_LANES]);
            codes[c] = (int8_t)q;
        }
    }
}
