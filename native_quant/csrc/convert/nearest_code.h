/* A quotient to the nearest code (numerics.md, section 7), as every other kernel must do it. */
#ifndef KT_NEAREST_CODE_H
#define KT_NEAREST_CODE_H

#include <math.h>

#include "bf16.h"
#include "kernels.h"

static inline float kt_nearest_code(float q, const kt_code_range *codes) {
    const float least = (float)codes->least, most = (float)codes->most;
    q = q < least ? least : q > most ? most : q; /* NaN stays NaN */
    if (!codes->precision) return rintf(q);
    int32_t power = (int32_t)(kt_bits(q) & 0x7f800000) - ((codes->precision - 1) << 23);
    float step = power > 0x3f800000 ? kt_float((uint32_t)power) : 1.0f;
    return rintf(q / step) * step;
}

#endif
