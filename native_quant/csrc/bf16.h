/* Bits and floats. BF16 is the upper half of a float32. */
#ifndef KT_BF16_H
#define KT_BF16_H

#include <stdint.h>
#include <string.h>

enum { KT_BF16_INFINITY = 0x7f80, KT_BF16_NAN = 0x7fc0, KT_BF16_MAGNITUDE = 0x7fff, KT_BF16_SIGN = 0x8000 };

static inline float kt_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t kt_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline uint16_t kt_load16(const uint8_t *address) {
    uint16_t bits;
    memcpy(&bits, address, sizeof bits);
    return bits;
}

static inline float kt_from_bf16(uint16_t bits) {
    return kt_float((uint32_t)bits << 16);
}

/* IEEE 754 binary16: sign, 5 exponent bits (bias 15), 10 fraction bits. Exact in float32. */
static inline float kt_from_fp16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ff;
    if (exponent == 31) return kt_float(sign | 0x7f800000 | fraction << 13);
    if (exponent == 0) return kt_float(sign | kt_bits((float)fraction * 0x1p-24f));
    return kt_float(sign | (exponent + 112) << 23 | fraction << 13);
}

static inline int kt_is_finite(float x) {
    return (kt_bits(x) & 0x7f800000) != 0x7f800000;
}

/* Round to nearest even: add half a unit, less one if the result would be even and the rest is exactly half. */
static inline uint16_t kt_to_bf16(float x) {
    uint32_t u = kt_bits(x);
    if ((u & 0x7fffffff) > 0x7f800000) return KT_BF16_NAN;
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

#endif
