/* Shared by the vector kernels of quantize_row: from the largest magnitude of a row to its scale. */
#ifndef KT_QUANTIZE_ROW_H
#define KT_QUANTIZE_ROW_H

#include "bf16.h"
#include "kernels.h"

/* amax: the bits of the largest |x|, at least those of infinity if a value is not finite. Returns the scale, or NaN. */
static inline float kt_row_scale_int8(uint32_t amax) {
    return amax < 0x7f800000 ? kt_float(amax) * (1.0f / 127.0f) : kt_float(0x7fc00000);
}

/* A row that is 0, or of which one value is not finite: codes and sums are 0. */
static inline void kt_quantize_to_zero(int64_t k, int64_t copies, const kt_code_row *place, int32_t *sums) {
    for (int64_t i = 0; i < copies; i++)
        for (int64_t j = 0; j < k; j += 64) memset(place[i].q + j / 64 * place[i].pitch, 0, 64);
    memset(sums, 0, (size_t)((k + KT_K_BLOCK - 1) / KT_K_BLOCK) * sizeof *sums);
}

#endif
