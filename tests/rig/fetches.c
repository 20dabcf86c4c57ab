/* What the AMX kernel for int8 activations fetches: its own code (gemm_amx.h), but tile instructions do nothing here,
 * and prefetches are counted. Needs AVX-512, or avx512_emulated.h, and no AMX.
 * Usage: fetches BITS M TILE_ROWS K PANELS
 * Multiplies M tokens by the first panels of a weight; the next call is to multiply by a weight of the same size.
 * Prints a digit for each line of 64 bytes of these panels: how often it was fetched, as part of this weight or of the
 * next one; then the number of fetches of anything else; then those of the next weight before the first product. */
#include <immintrin.h>
#include <stdio.h>
#include <stdlib.h>

#include "arch/x86/tiles.h"

static void fetch(const char *address);
static int64_t products;

#undef _mm_prefetch
#define _mm_prefetch(address, hint) fetch(address)
#undef KT_TILES_CONFIGURE
#define KT_TILES_CONFIGURE(config) (void)(config)
#undef KT_TILES_RELEASE
#define KT_TILES_RELEASE() (void)0
#undef KT_TILE_ZERO
#define KT_TILE_ZERO(tile) (void)0
#undef KT_TILE_LOAD
#define KT_TILE_LOAD(tile, from, stride) (void)(from)
#undef KT_TILE_LOAD_PAST_L1
#define KT_TILE_LOAD_PAST_L1(tile, from, stride) (void)(from)
#undef KT_TILE_STORE
#define KT_TILE_STORE(tile, to, stride) (void)(to)
#undef KT_TILE_MULTIPLY
#define KT_TILE_MULTIPLY(c, a, b) products++

#include "forward/gemm_amx.h"

static uint8_t *weights; /* this one and the next one */
static int64_t size, elsewhere, early, *count;

static void fetch(const char *address) {
    int64_t at = (const uint8_t *)address - weights;
    if (at < 0 || at >= 2 * size) {
        elsewhere++;
        return;
    }
    count[at % size / 64]++;
    if (at >= size && products == 0) early++;
}

KT_TARGET_AMX static void multiply(int bits, const kt_gemm *job) {
    if (bits == 8) kt_gemm_tiles(8, job);
    else kt_gemm_tiles(4, job);
}

/* Prints the counts of a panel, and takes them back. */
static void show(int bits, const kt_panel *panel, int64_t k) {
    for (int64_t first = 0; first < k; first += KT_K_BLOCK) {
        int64_t line = (kt_panel_tiles(bits, panel, k, first) - weights) / 64;
        for (int64_t lines = kt_first_block_bytes(bits, k - first) / 64; lines; lines--, count[line++] = 0)
            putchar(count[line] < 9 ? '0' + (int)count[line] : '9');
    }
}

int main(int arguments, char **argument) {
    if (arguments != 6) return 2;
    int bits = atoi(argument[1]);
    int64_t m = atol(argument[2]), rows = atol(argument[3]), k = atol(argument[4]), panels = atol(argument[5]);
    int64_t block = kt_get_geometry(bits)->block_rows, room = m + rows;
    size = (panels * KT_PANEL_ROWS + block - 1) / block * block * k * bits / 8;
    weights = aligned_alloc(64, (size_t)(2 * size));
    count = calloc((size_t)(size / 64), sizeof *count);
    kt_panel *panel = calloc((size_t)panels, sizeof *panel);
    for (int64_t s = 0; s < panels; s++) panel[s] = kt_get_panel(bits, weights, k, s);
    multiply(bits, &(kt_gemm){.m = m,
                              .k = k,
                              .a = aligned_alloc(64, (size_t)(room * k)),
                              .tile_rows = rows,
                              .panels = panels,
                              .panel = panel,
                              .c = aligned_alloc(64, (size_t)(panels * room * KT_PANEL_ROWS * 4)),
                              .c_pitch = room * KT_PANEL_ROWS,
                              .next = weights + size,
                              .next_bytes = kt_first_block_bytes(bits, k),
                              .scratch = aligned_alloc(64, KT_GEMM_SCRATCH)});
    for (int64_t s = 0; s < panels; s++) show(bits, &panel[s], k);
    for (int64_t line = 0; line < size / 64; line++) elsewhere += count[line];
    printf("\n%lld\n%lld\n", (long long)elsewhere, (long long)early);
    return 0;
}
