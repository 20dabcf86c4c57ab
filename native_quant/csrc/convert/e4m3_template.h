/* Two vectors of values at a time, the even and the odd ones as float32; joined again they are two bytes in each word
 * of 32 bits. */
#include "e4m3.h"

/* kt_e4m3_magnitude of x / scale in each lane, and KT_E4M3_LEAST >> 20 more. */
TARGET static inline ints e4m3_magnitudes(ints x, floats scale) {
    floats y = div_ps(castsi_ps(x), scale);
    ints power = and_si(castps_si(y), set1_epi32(KT_E4M3_EXPONENT));
    power = max_epi32(power, set1_epi32(KT_E4M3_LEAST));
    ints up = add_epi32(power, set1_epi32(KT_E4M3_UP));
    ints sum = castps_si(add_ps(y, castsi_ps(up)));
    return add_epi32(srli_epi32(power, 20), sub_epi32(sum, up));
}

TARGET void KERNEL_OF(e4m3)(const uint8_t *values, int64_t count, float scale, uint8_t *codes) {
    const floats s = set1_ps(scale);
    for (int64_t i = 0; i < count; i += 2 * LANES) {
        ints x = loadu_si(values + 2 * i), magnitude = and_si(x, set1_epi16(KT_BF16_MAGNITUDE));
        ints even = e4m3_magnitudes(slli_epi32(magnitude, 16), s);
        ints odd = e4m3_magnitudes(and_si(magnitude, set1_epi32(0x7fff0000)), s);
        ints both = add_epi32(even, slli_epi32(odd, 8));
        both = sub_epi32(both, set1_epi32((KT_E4M3_LEAST >> 20) * 0x101));
        /* the signs: bit 15 to bit 7, bit 31 to bit 15 */
        both = or_si(both, and_si(srli_epi32(x, 8), set1_epi32(0x80)));
        both = or_si(both, and_si(srli_epi32(x, 16), set1_epi32(0x8000)));
        store_epi32_epi16(codes + i, both);
    }
}
