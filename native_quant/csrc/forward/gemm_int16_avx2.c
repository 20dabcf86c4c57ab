/* Products of integers, AVX2: 12 of 16 registers hold sums. */
#include "vectors_avx2.h"
#include "gemm_int16_maddubs.h"

enum { BLOCK = 6, FEW_BLOCK = 5, FEW_SCALES_AHEAD = 3, FEW_FETCHED = 1 };
#define FEW_AHEAD(bits) ((bits) < 8 ? 4096 : 3584)
#define FEW_UNITS {256, 128, 64}
#define BLOCKS(X) X(1) X(2) X(3) X(4) X(5) X(6)
#define FEW_BLOCKS(X) X(1) X(2) X(3) X(4) X(5)
#define FEW(bits) 10

#include "gemm_int16_template.h"
#include "gemm_int16_few_template.h"
