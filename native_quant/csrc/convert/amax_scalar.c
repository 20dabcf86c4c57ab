/* Without the sign, BF16 bits order as the values do: the maximum is one of integers. */
#include "bf16.h"
#include "kernels.h"

uint16_t kt_amax_scalar(const uint8_t *row, int64_t k) {
    uint16_t amax = 0;
    for (int64_t c = 0; c < k; c++) {
        uint16_t magnitude = kt_load16(row + 2 * c) & KT_BF16_MAGNITUDE;
        if (magnitude > amax) amax = magnitude;
    }
    return amax;
}
