/* The values of the 16 codes of FP4 E2M1 (OCP Microscaling Formats 1.0): sign, 2 exponent bits (bias 1), 1 fraction
 * bit. */
#ifndef KT_E2M1_H
#define KT_E2M1_H

static const float kt_e2m1[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

#endif
