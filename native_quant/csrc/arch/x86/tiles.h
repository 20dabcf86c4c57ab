/* Instructions for AMX tiles. A tile is 16 rows of 64 bytes; its number, 0 to 7, must be a literal.
 *
 * This is inline assembly instead of <immintrin.h>, because gcc 12 tells the compiler that _tile_loadconfig reads 8
 * bytes (so that it drops stores to the other 56, and ldtilecfg faults) and that _tile_loadd reads none (so that it may
 * move a store past it). */
#ifndef KT_TILES_H
#define KT_TILES_H

#include <stdint.h>

/* The operand of ldtilecfg (Intel SDM volume 1, 18.3). */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} kt_tile_config;
_Static_assert(sizeof(kt_tile_config) == 64, "ldtilecfg reads 64 bytes");

#ifndef KT_EMULATED
#define KT_TRAP
#else /* A CPU with AMX refuses tile instructions as long as no tiles are configured, but not these two                \
         (tests/rig/amx_trapped.c). */
#define KT_TRAP "ud2\n\t"
#endif

/* Begins the use of tiles, and sets them to zero. config: a pointer. */
#define KT_TILES_CONFIGURE(config) __asm__ volatile(KT_TRAP "ldtilecfg %0" ::"m"(*(const kt_tile_config *)(config)))
/* Ends the use of tiles, so that the operating system need not save 8 KiB when it switches threads. */
#define KT_TILES_RELEASE() __asm__ volatile(KT_TRAP "tilerelease")
#define KT_TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
/* stride: bytes from row to row. */
#define KT_TILE_LOAD(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(stride)) : "memory")
/* For data that is not read again soon, so that it does not evict other lines from L1. */
#define KT_TILE_LOAD_PAST_L1(tile, from, stride) \
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(stride)) : "memory")
#define KT_TILE_STORE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(stride)) : "memory")
/* c[m][n] += the sum over j < 64 of a[m][j] * b[j / 4][4 * n + j % 4]: int8 times int8, added to int32. */
#define KT_TILE_MULTIPLY(c, a, b) __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)
/* c[m][n] += the sum over j < 32 of a[m][j] * b[j / 2][2 * n + j % 2]: BF16 times BF16, added to float32 in the order
   of numerics.md, section 5b. */
#define KT_TILE_MULTIPLY_BF16(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

#endif
