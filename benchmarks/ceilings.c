/* What this machine can do at most: integer operations in a second. Built by ceilings.py with the compiler that is there;
 * every function works for one thread and returns something that depends on all of its work. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512VNNI__)
#define STEP(n) "vpdpbusd %%zmm16, %%zmm16, %%zmm" #n "\n\t"

/* vpdpbusd on registers alone: 16 chains hide its latency. Returns the operations done. */
uint64_t vnni_int8(uint64_t rounds)
{
    __asm__ volatile("vpxord %%zmm16, %%zmm16, %%zmm16" : : : "xmm16");
    for (uint64_t r = 0; r < rounds; r++)
        __asm__ volatile(STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7)
                         STEP(8) STEP(9) STEP(10) STEP(11) STEP(12) STEP(13) STEP(14) STEP(15)
                         : : : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7",
                           "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "xmm16");
    __asm__ volatile("vzeroupper" : : : "memory");
    return rounds * 16 * 128;
}
#endif

#if defined(__AMX_INT8__)
#include <sys/syscall.h>
#include <unistd.h>

enum { K_TILES = 64, PANELS = 4, PANEL = K_TILES * 2 * 1024 }; /* a panel: 32 rows of 4096 columns, 128 KiB */

/* 0 where the kernel lets this process use tiles. */
int amx_permit(void)
{
    return (int)syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */);
}

/* Eight tiles of 16 rows of 64 bytes. */
static void configure_tiles(void)
{
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t columns[16];
        uint8_t rows[16];
    } config __attribute__((aligned(64)));
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int t = 0; t < 8; t++)
        config.columns[t] = 64, config.rows[t] = 16;
    __asm__ volatile("ldtilecfg %0" : : "m"(config)); /* gcc 12's intrinsic names only 8 of the 64 bytes */
}

/* tdpbssd on registers alone, four sums. Returns the operations done. */
uint64_t amx_int8_registers(uint64_t rounds)
{
    configure_tiles();
    __asm__ volatile("tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3\n\t"
                     "tilezero %%tmm4\n\ttilezero %%tmm5\n\ttilezero %%tmm6\n\ttilezero %%tmm7" : : : "memory");
    for (uint64_t r = 0; r < rounds; r++)
        __asm__ volatile("tdpbssd %%tmm2, %%tmm0, %%tmm4\n\ttdpbssd %%tmm3, %%tmm0, %%tmm5\n\t"
                         "tdpbssd %%tmm2, %%tmm1, %%tmm6\n\ttdpbssd %%tmm3, %%tmm1, %%tmm7" : : : "memory");
    __asm__ volatile("tilerelease");
    return rounds * 4 * (2 * 16 * 16 * 64);
}

/* 2x2 tiles, four panels of A with four of B: 1 MiB of operands, read from L2 again for every pair. Returns the
 * operations done. */
uint64_t amx_int8(const uint8_t *operands, uint64_t rounds)
{
    configure_tiles();
    for (uint64_t r = 0; r < rounds; r++)
        for (int i = 0; i < PANELS * PANELS; i++) {
            const uint8_t *a = operands + (size_t)(i % PANELS) * PANEL,
                          *b = operands + (size_t)(PANELS + i / PANELS) * PANEL;
            __asm__ volatile("tilezero %%tmm4\n\ttilezero %%tmm5\n\ttilezero %%tmm6\n\ttilezero %%tmm7" : : : "memory");
            for (int k = 0; k < K_TILES; k++, a += 2048, b += 2048)
                __asm__ volatile("tileloadd (%0,%2,1), %%tmm0\n\t"
                                 "tileloadd (%1,%2,1), %%tmm2\n\t"
                                 "tileloadd 1024(%1,%2,1), %%tmm3\n\t"
                                 "tdpbssd %%tmm2, %%tmm0, %%tmm4\n\t"
                                 "tileloadd 1024(%0,%2,1), %%tmm1\n\t"
                                 "tdpbssd %%tmm3, %%tmm0, %%tmm5\n\t"
                                 "tdpbssd %%tmm2, %%tmm1, %%tmm6\n\t"
                                 "tdpbssd %%tmm3, %%tmm1, %%tmm7"
                                 : : "r"(a), "r"(b), "r"((size_t)64) : "memory");
        }
    __asm__ volatile("tilerelease");
    return rounds * PANELS * PANELS * K_TILES * 4 * (2 * 16 * 16 * 64);
}
#endif
