/* Two vectors of columns at a time, the even and the odd ones as float32. Joined again they are, in each word of 32
 * bits, a byte of two codes (4 bits) or two bytes (8 bits). */
#include "bf16_template.h"
#include "groups_row.h"

/* The value of largest magnitude; with its sign, the negative one of two, where that counts. */
TARGET static inline uint16_t group_largest(int rounding, const uint8_t *p, int64_t group) {
    ints a = bf16_magnitudes(p), signs = loadu_si(p);
    for (int64_t c = 2 * LANES; c < group; c += 2 * LANES) {
        a = max_epu16(a, bf16_magnitudes(p + 2 * c));
        signs = max_epu16(signs, loadu_si(p + 2 * c));
    }
    uint16_t amax = reduce_max_epu16(a);
    if (rounding == KTQ_SIGNED && reduce_max_epu16(signs) == (amax | KT_BF16_SIGN)) amax |= KT_BF16_SIGN;
    return amax;
}

/* x / scale, rounded to BF16 if the library does, cut to what the bits hold, and as an unsigned code in the lowest
   byte: adding 1.5 * 2^23 + 2^(bits-1) leaves no place for a fraction. */
TARGET static inline ints unsigned_codes(int bits, int rounding, floats x, floats scale) {
    const float offset = bits == 4 ? 8.0f : 128.0f;
    floats q = div_ps(x, scale);
    if (rounding == KTQ_LIBRARY) q = upper_half(round_numbers_to_bf16(q));
    q = min_ps(max_ps(q, set1_ps(-offset)), set1_ps(offset - 1.0f));
    return castps_si(add_ps(q, set1_ps(0x1.8p23f + offset)));
}

TARGET static inline __attribute__((always_inline)) int
quantize_row(int bits, int rounding, int64_t group, const uint8_t *row, int64_t k, uint8_t *packed, uint16_t *scale) {
    const ints low = set1_epi32((1 << bits) - 1);
    /* All scales first: each is a chain of latencies, and those of several groups overlap. The row is in L1 the second
     * time. */
    for (int64_t g = 0; g < k / group; g++) {
        uint16_t largest = group_largest(rounding, row + 2 * g * group, group);
        if ((largest & KT_BF16_MAGNITUDE) >= KT_BF16_INFINITY) return 0;
        scale[g] = kt_group_scale(bits, rounding, largest);
    }
    for (int64_t g = 0; g < k / group; g++, row += 2 * group, packed += group * bits / 8) {
        const floats d = set1_ps(kt_from_bf16(scale[g]));
        for (int64_t c = 0; c < group; c += 2 * LANES) {
            ints x = loadu_si(row + 2 * c);
            ints even = unsigned_codes(bits, rounding, castsi_ps(slli_epi32(x, 16)), d);
            ints odd = unsigned_codes(bits, rounding, upper_half(x), d);
            ints both = or_si(and_si(even, low), slli_epi32(and_si(odd, low), bits));
            if (bits == 4) store_epi32_epi8(packed + c / 2, both);
            else store_epi32_epi16(packed + c, both);
        }
    }
    return 1;
}

TARGET int KERNEL_OF(groups)(int bits, int64_t group, int rounding, const uint8_t *row, int64_t k, uint8_t *packed,
                             uint16_t *scale) {
    if (bits == 4 && rounding == KTQ_LIBRARY) return quantize_row(4, KTQ_LIBRARY, group, row, k, packed, scale);
    if (bits == 4 && rounding == KTQ_SIGNED) return quantize_row(4, KTQ_SIGNED, group, row, k, packed, scale);
    if (bits == 4) return quantize_row(4, KTQ_FLOAT32, group, row, k, packed, scale);
    if (rounding == KTQ_LIBRARY) return quantize_row(8, KTQ_LIBRARY, group, row, k, packed, scale);
    return quantize_row(8, KTQ_FLOAT32, group, row, k, packed, scale);
}
