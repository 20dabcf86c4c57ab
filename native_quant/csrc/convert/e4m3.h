/* BF16 to FP8 E4M3, to nearest even (numerics.md, section 9): what all kernels of the family know. */
#ifndef KT_E4M3_H
#define KT_E4M3_H

#include "bf16.h"
#include "kernels.h"

/* Adding to y 2^20 times the power of two below it, or 2^14 if y is below 2^-6, leaves it three bits of fraction. The
   lowest bits of the sum are then y in units of its last place in E4M3: 8..16, or 0..8 where the code is subnormal.
   Eight times the number of exponents above 2^-6 and these units are the code: 16 units are 8 of the next exponent. */
enum {
    KT_E4M3_EXPONENT = 0x7f800000,
    KT_E4M3_LEAST = 0x3c800000, /* 2^-6 */
    KT_E4M3_UP = 20 << 23,      /* times 2^20 */
};

/* The code of 0 <= y <= 448. */
static inline uint8_t kt_e4m3_magnitude(float y) {
    uint32_t power = kt_bits(y) & KT_E4M3_EXPONENT;
    if (power < KT_E4M3_LEAST) power = KT_E4M3_LEAST;
    uint32_t up = power + KT_E4M3_UP, units = kt_bits(y + kt_float(up)) - up;
    return (uint8_t)(((power - KT_E4M3_LEAST) >> 20) + units);
}

#endif
