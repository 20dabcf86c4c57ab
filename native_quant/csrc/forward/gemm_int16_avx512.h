/* Shared by the products of int16 on AVX-512, with and without VNNI: 24 of 32 registers hold sums. */
#include "vectors_avx512.h"

enum { BLOCK = 12 };
#define BLOCKS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12)
