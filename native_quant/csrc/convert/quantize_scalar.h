/* The scale of a row, and one value to the INT8 grid, as every other kernel must do it: numerics.md. */
#ifndef KT_QUANTIZE_SCALAR_H
#define KT_QUANTIZE_SCALAR_H

#include "bf16.h"

/* The smallest normal float32; a scale below it is flushed to 0, as kt-kernel does (it runs with FTZ and DAZ on). */
#define KT_SMALLEST_NORMAL 0x1p-126f

/* The scale of a row. INT8 multiplies by fl(1/127) (into which kt-kernel's compiler turned the division), INT4
   divides in float64. */
static inline float kt_row_scale(int bits, uint16_t amax_bits) {
    float amax = kt_from_bf16(amax_bits);
    float scale = bits == 8 ? amax * (1.0f / 127.0f) : (float)((double)amax / 112.0);
    return scale < KT_SMALLEST_NORMAL ? 0.0f : scale;
}

/* round-half-to-even(fl32(x * reciprocal)); a subnormal x counts as 0.
   |x| <= 127 scale or 112 scale, within a few units in the last place: the result is in -127..127 without saturation.
 */
static inline int kt_to_int8(uint16_t bf16, float reciprocal) {
    if (!(bf16 & 0x7f80)) return 0;
    float p = kt_from_bf16(bf16) * reciprocal;
    /* Adding 1.5 * 2^23 leaves no place for a fraction, so the addition itself rounds to nearest even. */
    return (int)(int32_t)(kt_bits(p + 0x1.8p23f) - kt_bits(0x1.8p23f));
}

#endif
