/* exp for scalars and for vectors, the same operations in both. */
#ifndef KT_EXPONENTIAL_TEMPLATE_H
#define KT_EXPONENTIAL_TEMPLATE_H

/* exp(x) for x <= 88: 2^(x log2 e), the integer part as an exponent, the fraction by kt-kernel's polynomial. */
TARGET static inline floats kt_exp(floats x) {
    const floats magic = set1_ps(0x1.8p23f);
    x = max_ps(set1_ps(-87.0f), x); /* below, 1 + exp(x) is 1; of a NaN and a number, the second operand */
    floats y = mul_ps(x, set1_ps(0x1.715476p+0f));
    floats whole = add_ps(y, magic), fraction = sub_ps(y, sub_ps(whole, magic));
    floats p = set1_ps(0.0013333558f);
    p = fmadd_ps(p, fraction, set1_ps(0.0096181291f));
    p = fmadd_ps(p, fraction, set1_ps(0.0555041087f));
    p = fmadd_ps(p, fraction, set1_ps(0.2402265069f));
    p = fmadd_ps(p, fraction, set1_ps(0.6931471805f));
    p = fmadd_ps(p, fraction, set1_ps(0.9999999995f));
    /* The shift drops what magic has above the integer. */
    ints power = slli_epi32(add_epi32(castps_si(whole), set1_epi32(127)), 23);
    return mul_ps(p, castsi_ps(power));
}

#endif
