/* What codes of 4 bits stand for. */
#ifndef KT_CODES_H
#define KT_CODES_H

#include "ktq.h"

/* The values of the 16 codes: an integer less 8, or E2M1 (OCP Microscaling Formats 1.0): sign, 2 exponent bits
 * (bias 1), 1 fraction bit. */
static inline const float *kt_values_of_codes(int kind) {
    static const float int4[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    static const float e2m1[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    return kind == KTQ_INT4 ? int4 : e2m1;
}

#endif
