/* The instruction sets of x86-64: their names, the compiler's target attributes, and what cpu.c checks for each.
 * A function that uses an instruction set carries its attribute; no file is ever compiled with -m<something>. */
#ifndef KT_ISA_H
#define KT_ISA_H

#define KT_ARCH_X86

/* Worst first, each with the set that it contains. "avx512" is the Skylake-X set: no VNNI, no VBMI. */
#define KT_ISAS(X) \
    X(scalar, scalar) X(avx2, scalar) X(avxvnni, avx2) X(avx512, avx2) X(avx512vnni, avx512) X(avx512bf16, avx512vnni) \
    X(amx, avx512bf16)

/* cpu.c: AVX2, FMA and F16C. */
#define KT_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#ifndef KT_EMULATED_AVX512
/* cpu.c: AVX-512 F, BW, VL, DQ on top of AVX2. */
#define KT_TARGET_AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")))
/* cpu.c: AVX-512 VNNI on top of AVX-512. */
#define KT_TARGET_AVX512VNNI __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
/* cpu.c: AVX512-BF16 and AVX-512 VBMI on top of AVX-512 VNNI. Cooper Lake, which has no VBMI, uses VNNI. */
#define KT_TARGET_AVX512BF16 \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx512bf16")))
#ifndef KT_EMULATED
/* cpu.c: the 256-bit dot products of AVX-VNNI on top of AVX2. */
#define KT_TARGET_AVXVNNI __attribute__((target("avx2,fma,f16c,avxvnni")))
#else /* for tests on any CPU with AVX-512 VNNI (tests/emulated.sh): dpbusd256.h as AVX-512 encodes it */
#define KT_TARGET_AVXVNNI KT_TARGET_AVX512VNNI
#endif
/* cpu.c: AMX tiles, their int8 dot products and those of BF16 on top of AVX512-BF16. */
#define KT_TARGET_AMX \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx512bf16," \
                          "amx-tile,amx-int8,amx-bf16")))
/* A vector register that inline assembly reads and writes. */
#define KT_IN_REGISTER "+v"
#else /* for tests on any CPU with AVX2 (tests/emulated.sh): intrinsics of AVX-512 are made of those of AVX2 */
#define KT_TARGET_AVX512 KT_TARGET_AVX2
#define KT_TARGET_AVX512VNNI KT_TARGET_AVX2
#define KT_TARGET_AVX512BF16 KT_TARGET_AVX2
#define KT_TARGET_AVXVNNI KT_TARGET_AVX2
#define KT_TARGET_AMX KT_TARGET_AVX2
#define KT_IN_REGISTER "+m" /* no register holds 64 bytes */
#endif

#endif
