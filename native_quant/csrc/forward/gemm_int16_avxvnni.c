/* Products of integers, AVX-VNNI: vpdpbusd adds all products of an int32. 12 of 16 registers hold sums. */
#include "arch/x86/dpbusd256.h"
#include "vectors_avx2.h"
#undef TARGET
#undef KERNEL_OF
#define TARGET KT_TARGET_AVXVNNI
#define KERNEL_OF(family) kt_##family##_avxvnni

enum { BLOCK = 6, FEW_BLOCK = 3, FEW_SCALES_AHEAD = 3, FEW_FETCHED = 1 };
#define FEW_AHEAD(bits) ((bits) < 8 ? 4096 : 3584)
#define FEW_UNITS {256, 128, 64}
#define BLOCKS(X) X(1) X(2) X(3) X(4) X(5) X(6)
#define FEW_BLOCKS(X) X(1) X(2) X(3)
#define FEW(bits) ((bits) < 6 ? 8 : (bits) == 6 ? 4 : 6)
#define PART_LINES(bits) 4
#define WIDE(tokens) 0

TARGET static inline ints add_products(ints sum, ints weights, ints a) {
    sum = add_epi32(sum, madd_epi16(weights, a));
    KEEP_IN_REGISTER(sum);
    return sum;
}

TARGET static inline ints add_quads(ints part, ints weights, ints a) {
    return KT_DPBUSD256(part, weights, a);
}

TARGET static inline ints add_widened(ints sum, ints part, int h) {
    return add_epi32(sum, h ? slli_epi32(part, 7) : part);
}

#include "gemm_int16_template.h"
#include "gemm_int16_few_template.h"
