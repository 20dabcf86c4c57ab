/* Instruction sets: the number, the name and what the compiler may emit for it, side by side with what cpu.c checks.
 * A function that uses an instruction set carries its attribute; no file is ever compiled with -m<something>. */
#ifndef KT_ISA_H
#define KT_ISA_H

/* Worst first. "avx512" is the Skylake-X set: no VNNI, no VBMI. */
#define KT_ISAS(X) X(scalar) X(avx2) X(avx512) X(amx)

#define KT_ISA_NUMBER(name) KT_ISA_##name,
enum { KT_ISAS(KT_ISA_NUMBER) KT_ISA_COUNT };
#undef KT_ISA_NUMBER

/* cpu.c: AVX2 and F16C. */
#define KT_TARGET_AVX2 __attribute__((target("avx2,f16c")))
/* cpu.c: AVX-512 F, BW, VL, DQ on top of AVX2. */
#define KT_TARGET_AVX512 __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq")))

/* A bit per instruction set (1 << KT_ISA_avx2 ...) that this CPU and this kernel allow. Asks the kernel for AMX: call once. */
unsigned kt_cpu_isas(void);

#endif
