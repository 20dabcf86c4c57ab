/* AVX-512: pack_mxfp4_template.h, with magnitudes that are shifted. */
#include "vectors_avx512.h"

TARGET static inline ints load_value_table(int times) {
    const __m256i values = _mm256_setr_epi16(0, 256, 512, 768, 1024, 1536, 2048, 3072, 0, 0, 0, 0, 0, 0, 0, 0);
    return slli_epi16(_mm512_castsi256_si512(values), times - 1);
}

TARGET static inline ints look_up_value(ints codes, ints values) {
    return _mm512_permutexvar_epi16(codes, values);
}

TARGET static inline ints convert_exponents(ints exponent) {
    return or_si(exponent, slli_epi32(exponent, 16));
}

TARGET static inline ints fixed_point(ints bits, ints unit) {
    ints fraction = or_si(and_si(bits, set1_epi16(0x7f)), set1_epi16(0x80));
    return _mm512_srlv_epi16(slli_epi16(fraction, 4), sub_epi16(unit, srli_epi16(slli_epi16(bits, 1), 8)));
}

#include "pack_mxfp4_template.h"
