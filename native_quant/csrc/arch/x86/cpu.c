/* The instruction sets that this CPU and this kernel support. CPUID tells what the CPU has, XCR0 which registers the
 * kernel saves, and the AMX tile registers must be asked for besides (Linux 5.16: arch_prctl ARCH_REQ_XCOMP_PERM, for
 * the whole process). Bit numbers: Intel SDM volume 2A, CPUID, and volume 1, 13.3 (XCR0). */
#define _GNU_SOURCE /* syscall */
#include <cpuid.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels.h"
#include "reading.h"

enum { LEAF1_ECX_FMA = 1 << 12, LEAF1_ECX_OSXSAVE = 1 << 27, LEAF1_ECX_AVX = 1 << 28, LEAF1_ECX_F16C = 1 << 29 };
enum {
    LEAF7_EBX_AVX2 = 1 << 5,
    LEAF7_EBX_AVX512F = 1 << 16,
    LEAF7_EBX_AVX512DQ = 1 << 17,
    LEAF7_EBX_AVX512BW = 1 << 30
};
#define LEAF7_EBX_AVX512VL (1u << 31)
enum { LEAF7_ECX_AVX512VBMI = 1 << 1, LEAF7_ECX_AVX512VNNI = 1 << 11 };
enum { LEAF7_1_EAX_AVXVNNI = 1 << 4, LEAF7_1_EAX_AVX512BF16 = 1 << 5 };
enum { LEAF7_EDX_AMX_BF16 = 1 << 22, LEAF7_EDX_AMX_TILE = 1 << 24, LEAF7_EDX_AMX_INT8 = 1 << 25 };

/* XCR0: SSE and AVX; with opmask and both upper parts of zmm; tile configuration and data. */
enum { XCR0_AVX = 0x06, XCR0_AVX512 = 0xe6, XCR0_AMX = 0x60000 };
enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };

static uint64_t xcr0(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static int has(uint64_t set, uint64_t needed) {
    return (set & needed) == needed;
}

unsigned kt_cpu_isas(void) {
    unsigned isas = 1u << KT_ISA_scalar;
    unsigned a, b, c, d;

    if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, LEAF1_ECX_FMA | LEAF1_ECX_OSXSAVE | LEAF1_ECX_AVX | LEAF1_ECX_F16C))
        return isas;
    uint64_t saved = xcr0();
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return isas;

    if (!has(saved, XCR0_AVX) || !has(b, LEAF7_EBX_AVX2)) return isas;
    isas |= 1u << KT_ISA_avx2;
#ifdef KT_EMULATED_AVX512 /* isa.h */
    return (1u << KT_ISA_COUNT) - 1;
#endif
    unsigned more = 0, b1, c1, d1;
    if (a >= 1 && !__get_cpuid_count(7, 1, &more, &b1, &c1, &d1)) more = 0;
    if (has(more, LEAF7_1_EAX_AVXVNNI)) isas |= 1u << KT_ISA_avxvnni;

    unsigned avx512 = (unsigned)LEAF7_EBX_AVX512F | LEAF7_EBX_AVX512DQ | LEAF7_EBX_AVX512BW | LEAF7_EBX_AVX512VL;
    if (!has(saved, XCR0_AVX512) || !has(b, avx512)) return isas;
    isas |= 1u << KT_ISA_avx512;
    if (!has(c, LEAF7_ECX_AVX512VNNI)) return isas;
    isas |= 1u << KT_ISA_avx512vnni;
    if (has(more, LEAF7_1_EAX_AVX512BF16) && has(c, LEAF7_ECX_AVX512VBMI)) isas |= 1u << KT_ISA_avx512bf16;
#ifdef KT_EMULATED /* isa.h; tile instructions are trapped */
    return isas | 1u << KT_ISA_avxvnni | 1u << KT_ISA_amx;
#endif

    if (!has(isas, 1u << KT_ISA_avx512bf16)) return isas;
    unsigned amx = LEAF7_EDX_AMX_TILE | LEAF7_EDX_AMX_INT8 | LEAF7_EDX_AMX_BF16;
    if (!has(saved, XCR0_AMX) || !has(d, amx)) return isas;
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) != 0) return isas;
    return isas | 1u << KT_ISA_amx;
}

static int is_intel(void) {
    unsigned a, b, c, d; /* "GenuineIntel" */
    return __get_cpuid(0, &a, &b, &c, &d) && b == 0x756e6547 && d == 0x49656e69 && c == 0x6c65746e;
}

/* vdpbf16ps is two fused multiply-adds. Intel's processors are faster without it (Emerald Rapids: one in 2.2 cycles, or
   four of them). */
unsigned kt_cpu_slow_isas(void) {
    return is_intel() ? 1u << KT_ISA_avx512bf16 : 0;
}

/* Returns the bytes of a core's first-level data cache; 0 if unknown. Caches are listed by leaf 4, on AMD by leaf
   8000001Dh (AMD APM volume 3, E.4.15): type 1 is data, 0 ends the list. */
static unsigned measure_l1(void) {
    unsigned a, b, c, d;
    for (unsigned i = 0; __get_cpuid_count(is_intel() ? 4 : 0x8000001d, i, &a, &b, &c, &d) && a & 31; i++)
        if ((a & 31) == 1 && (a >> 5 & 7) == 1)
            return ((b >> 22) + 1) * ((b >> 12 & 1023) + 1) * ((b & 4095) + 1) * (c + 1);
    return 0;
}

static const kt_reading small_l1 = {.in_order = 1}; /* Zen 4: two chunks do not fit into 32 KiB */
static const kt_reading of_intel = {.in_turn = 1, .far = 1}; /* Emerald Rapids */
static const kt_reading of_amd = {.in_order = 1, .in_turn = 1, .long_units = 1, .scales_in_l1 = 1}; /* Zen 5 */

kt_reading kt_reads;

__attribute__((constructor)) static void choose_reading(void) {
    const unsigned l1 = measure_l1();
    kt_reads = l1 && l1 < 48 << 10 ? small_l1 : is_intel() ? of_intel : of_amd;
}
