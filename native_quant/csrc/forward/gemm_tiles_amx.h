/* Shared by the products of int8 and of BF16 in AMX tiles. Tiles 0 and 1 hold activations, a token in each row; 2 and 3
 * weights, the two halves of 32 rows; 4 to 7 the sums of 0 with 2 and 3, and of 1 with 2 and 3. */
#ifndef KT_GEMM_TILES_AMX_H
#define KT_GEMM_TILES_AMX_H

#include "arch/x86/tiles.h"
#include "gemm_avx512.h"

enum { KT_TILE_TOKENS = 16 };

/* Tiles of activations and sums get as many rows as there are tokens, at most KT_TILE_TOKENS. */
KT_TARGET_AMX static inline void kt_configure_tiles(int64_t tokens) {
    kt_tile_config config = {.palette = 1};
    uint8_t token_rows = tokens < KT_TILE_TOKENS ? (uint8_t)tokens : KT_TILE_TOKENS;
    for (int tile = 0; tile < 8; tile++) {
        config.row_bytes[tile] = 64;
        config.rows[tile] = tile == 2 || tile == 3 ? 16 : token_rows;
    }
    KT_TILES_CONFIGURE(&config);
}

KT_INLINE KT_TARGET_AMX void kt_zero_sums(int two) {
    KT_TILE_ZERO(4);
    KT_TILE_ZERO(5);
    if (two) {
        KT_TILE_ZERO(6);
        KT_TILE_ZERO(7);
    }
}

/* Sums, float32 or int32, to c[token * 32 + row]: tiles 4 and 5 from token 0 on; if `two`, 6 and 7 from `second`. */
KT_INLINE KT_TARGET_AMX void kt_store_sums(int two, void *c, int64_t second) {
    const int64_t row = KT_PANEL_ROWS * 4, half = KT_HALF_ROWS * 4;
    uint8_t *to = c;
    KT_TILE_STORE(4, to, row);
    KT_TILE_STORE(5, to + half, row);
    if (two) {
        KT_TILE_STORE(6, to + second * row, row);
        KT_TILE_STORE(7, to + second * row + half, row);
    }
}

#endif
