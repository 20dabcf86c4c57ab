/* Products of integers, AVX-512: 24 of 32 registers hold sums. */
#include "vectors_avx512.h"
#include "gemm_int16_maddubs.h"

enum { BLOCK = 12, FEW_BLOCK = 6, FEW_SCALES_AHEAD = 3, FEW_FETCHED = 1 };
#define FEW_AHEAD(bits) 3584
#define FEW_UNITS {128, 128, 32}
#define BLOCKS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12)
#define FEW_BLOCKS(X) X(1) X(2) X(3) X(4) X(5) X(6)
#define FEW(bits) 16

#include "gemm_int16_template.h"
#include "gemm_int16_few_template.h"
