/* Shared by the kernels of MXFP4 (numerics.md, section 9). */
#ifndef KT_PACK_MXFP4_H
#define KT_PACK_MXFP4_H

/* The exponents that are chosen, and that of a block of zeros. */
enum { KT_MXFP4_LEAST = 1, KT_MXFP4_MOST = 252, KT_MXFP4_ZERO_EXPONENT = 127 };

/* Exponents of the largest value, as BF16 has them, of which vector kernels make the codes: all numbers that count are
   normal, and no exponent is at its limit. They leave other rows, zeros aside, to the scalar kernel. */
enum { KT_MXFP4_NORMAL = 16, KT_MXFP4_HUGE = 254 };

#endif
