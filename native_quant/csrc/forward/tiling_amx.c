/* Activations for AMX: as few tiles as there can be, each with as few rows as will do. So the last one lacks fewer rows
 * than there are tiles: 17 tokens are two tiles of 9, 33 three of 11. A tile is loaded row by row, and a
 * product should take as long as it has rows, too; that has not been measured. */
#include "gemm_amx.h"

kt_tiling kt_tiling_amx(int bits, int64_t m) {
    if (m <= kt_vnni_tokens(bits)) return kt_tiling_scalar(bits, m);
    int64_t tiles = (m + KT_TILE_TOKENS - 1) / KT_TILE_TOKENS;
    return (kt_tiling){.rows = (m + tiles - 1) / tiles, .tokens = 512};
}
