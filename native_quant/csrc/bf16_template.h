/* Float32 to BF16 in vectors (bf16.h: kt_to_bf16). */
#ifndef KT_BF16_TEMPLATE_H
#define KT_BF16_TEMPLATE_H

#include "bf16.h"

/* The magnitudes of a vector of BF16 values, 16 bits each. */
TARGET static inline ints bf16_magnitudes(const uint8_t *values) {
    return and_si(loadu_si(values), set1_epi16(KT_BF16_MAGNITUDE));
}

/* BF16 in the upper half of each 32 bits, and the rest of the sum in the lower half; not for NaN. */
TARGET static inline ints round_numbers_to_bf16(floats x) {
    ints u = castps_si(x), odd = and_si(srli_epi32(u, 16), set1_epi32(1));
    return add_epi32(add_epi32(u, set1_epi32(0x7fff)), odd);
}

/* The same, also for NaN. */
TARGET static inline ints round_to_bf16(floats x) {
    return where_epi32(nan_ps(x), set1_epi32(KT_BF16_NAN << 16), round_numbers_to_bf16(x));
}

/* BF16 in each 32 bits; not for NaN. */
TARGET static inline ints to_bf16(floats x) {
    return srli_epi32(round_numbers_to_bf16(x), 16);
}

/* BF16 back in float32. */
TARGET static inline floats upper_half(ints x) {
    return castsi_ps(and_si(x, set1_epi32(0xffff0000)));
}

/* BF16 in the upper halves of the words of two vectors, in order. */
TARGET static inline ints kt_upper_halves(ints first, ints second) {
    return after_pack(packus_epi32(srli_epi32(first, 16), srli_epi32(second, 16)));
}

/* 16 bits each: codes below 128, less `offset` - 128, as BF16, if that is a small integer: 128 and a code are one. */
TARGET static inline ints codes_to_bf16(ints codes, floats offset) {
    ints above = or_si(codes, set1_epi16(0x4300));
    floats first = sub_ps(castsi_ps(slli_epi32(above, 16)), offset), second = sub_ps(upper_half(above), offset);
    return or_si(srli_epi32(castps_si(first), 16), castps_si(second));
}

#endif
