/* The 256-bit dot product of unsigned with signed bytes, added to int32 (eight sums of four products), for
 * KT_TARGET_AVXVNNI. */
#ifndef KT_DPBUSD256_H
#define KT_DPBUSD256_H

#include <immintrin.h>

#ifdef KT_EMULATED /* isa.h: the same instruction as AVX-512 encodes it, for tests on a CPU without AVX-VNNI */
#define KT_DPBUSD256(acc, u8, s8) _mm256_dpbusd_epi32(acc, u8, s8)
#else
#define KT_DPBUSD256(acc, u8, s8) _mm256_dpbusd_avx_epi32(acc, u8, s8)
#endif

#endif
