/* Products of integers, AVX-512 VNNI: vpdpbusd and vpdpwssd add all products of an int32. 24 of 32 registers hold
 * sums. */
#include "vectors_avx512.h"
#undef TARGET
#undef KERNEL_OF
#define TARGET KT_TARGET_AVX512VNNI
#define KERNEL_OF(family) kt_##family##_avx512vnni

enum { BLOCK = 12, FEW_BLOCK = 6, FEW_SCALES_AHEAD = 1, FEW_FETCHED = 4 };
#define FEW_AHEAD(bits) 3584
#define FEW_UNITS {128, 128, 32}
#define BLOCKS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12)
#define FEW_BLOCKS(X) X(1) X(2) X(3) X(4) X(5) X(6)
#define FEW(bits) ((bits) < 6 ? 16 : (bits) == 6 ? 8 : 24)
#define PART_LINES(bits) 4
#define WIDE(tokens) 0

TARGET static inline ints add_products(ints sum, ints weights, ints a) {
    sum = _mm512_dpwssd_epi32(sum, weights, a);
    KEEP_IN_REGISTER(sum);
    return sum;
}

TARGET static inline ints add_quads(ints part, ints weights, ints a) {
    return _mm512_dpbusd_epi32(part, weights, a);
}

TARGET static inline ints add_widened(ints sum, ints part, int h) {
    return add_epi32(sum, h ? slli_epi32(part, 7) : part);
}

#include "gemm_int16_template.h"
#include "gemm_int16_few_template.h"
