/* Activations as multiples of their units. */
#include <math.h>

#include "gemm_int16.h"

void kt_round_units_scalar(int64_t columns, uint16_t *a) {
    for (int64_t j = 0; j < columns; j += KT_SUM_COLUMNS, a += KT_SUM_COLUMNS) {
        uint32_t most = 0;
        for (int i = 0; i < KT_SUM_COLUMNS; i++) {
            uint32_t magnitude = a[i] & KT_BF16_MAGNITUDE;
            if (magnitude > most) most = magnitude;
        }
        const float unit = kt_int16_unit(most), reciprocal = kt_int16_reciprocal(unit);
        for (int i = 0; i < KT_SUM_COLUMNS; i++)
            a[i] = kt_to_bf16((reciprocal ? (float)lrintf(kt_from_bf16(a[i]) * reciprocal) : 0) * unit);
    }
}
