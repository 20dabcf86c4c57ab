/* Quotients to the nearest codes, as kt_nearest_code does it. precision is a constant where speed matters. min and max
 * give their second operand where one is NaN, so NaN stays NaN. */
#ifndef KT_NEAREST_CODE_TEMPLATE_H
#define KT_NEAREST_CODE_TEMPLATE_H

typedef struct {
    floats least, most;
    int precision;
} code_vectors;

TARGET static inline code_vectors load_code_range(const kt_code_range *codes, int precision) {
    return (code_vectors){set1_ps((float)codes->least), set1_ps((float)codes->most), precision};
}

TARGET static inline __attribute__((always_inline)) floats nearest_codes(floats q, code_vectors codes) {
    q = min_ps(codes.most, max_ps(codes.least, q));
    if (!codes.precision) return round_ps(q);
    ints power = sub_epi32(and_si(castps_si(q), set1_epi32(0x7f800000)), set1_epi32((codes.precision - 1) << 23));
    floats step = max_ps(castsi_ps(power), set1_ps(1.0f)); /* what wrapped around is negative */
    floats reciprocal = castsi_ps(sub_epi32(set1_epi32(0x7f000000), castps_si(step))); /* of a power of two */
    return mul_ps(round_ps(mul_ps(q, reciprocal)), step);
}

#endif
