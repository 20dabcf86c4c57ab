/* AVX2: pack_mxfp4_template.h, with magnitudes that are multiplied as float32. */
#include "vectors_avx2.h"

/* 256ths of the values in the bytes of a table. */
TARGET static inline ints load_value_table(int times) {
    static const uint8_t values[16] = {0, 1, 2, 3, 4, 6, 8, 12};
    return slli_epi16(load_repeated(values), times - 1);
}

TARGET static inline ints look_up_value(ints codes, ints values) {
    return slli_epi16(shuffle_epi8(values, codes), 8);
}

/* 512 * 2^(127 - e), e = exponent - 2 */
TARGET static inline ints convert_exponents(ints exponent) {
    return slli_epi32(sub_epi32(set1_epi32(265), exponent), 23);
}

TARGET static inline ints fixed_point(ints bits, ints unit) {
    const ints magnitude = set1_epi32(0x7fff0000);
    floats scale = castsi_ps(unit);
    floats even = castsi_ps(and_si(slli_epi32(bits, 16), magnitude)), odd = castsi_ps(and_si(bits, magnitude));
    ints high = slli_epi32(_mm256_cvttps_epi32(mul_ps(odd, scale)), 16);
    return or_si(_mm256_cvttps_epi32(mul_ps(even, scale)), high);
}

#include "pack_mxfp4_template.h"
