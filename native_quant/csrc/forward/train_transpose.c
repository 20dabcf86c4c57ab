/* Transposes a packed weight, a few panels at a time, to BF16, for products with gradients. */
#include <string.h>

#include "train.h"

enum { COLUMNS = KT_STEP_PANELS * KT_PANEL_ROWS };

/* Transposes half tiles of 16 rows to rows of 64 bytes. */
static void unpack_tiles(const kt_kernels *kernels, const uint8_t *tile, uint8_t *rows) {
    for (int half = 0; half < 2; half++)
        kernels->transpose(4, tile + half * KT_HALF_BYTES, 64, KT_HALF_ROWS, KT_HALF_ROWS,
                           rows + half * KT_HALF_ROWS * COLUMNS, COLUMNS);
}

/* Expands the 4-bit codes of the first half of each row to bytes, times 16: the lower codes, then the upper codes. */
static void spread_nibbles(uint8_t *rows) {
    for (uint8_t *row = rows; row < rows + KT_PANEL_ROWS * COLUMNS; row += COLUMNS)
        for (int i = 0; i < COLUMNS / 2; i += 8) {
            uint64_t word, low, high;
            memcpy(&word, row + i, sizeof word);
            low = word << 4 & 0xf0f0f0f0f0f0f0f0;
            high = word & 0xf0f0f0f0f0f0f0f0;
            memcpy(row + i, &low, sizeof low);
            memcpy(row + COLUMNS / 2 + i, &high, sizeof high);
        }
}

/* Prefetches the same columns of the next 32 rows, `stride` bytes further. */
static void prefetch(const uint8_t *from, int64_t bytes, int64_t stride) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + stride + i);
}

static void transpose_integers(const kt_kernels *kernels, const kt_matrix *w, int64_t first, int64_t count,
                               uint16_t *panels, uint8_t *rows) {
    int bits = w->format->bits;
    int64_t block = first / KT_K_BLOCK * KT_K_BLOCK;
    for (int64_t s = 0; s < w->n / KT_PANEL_ROWS; s++) {
        kt_panel panel = kt_get_panel(bits, w->codes, w->k, s);
        const uint8_t *tiles = kt_panel_tiles(bits, &panel, w->k, block) + (first - block) * KT_PANEL_ROWS * bits / 8;
        const kt_panel next = kt_get_panel(bits, w->codes, w->k, s + 1 < w->n / KT_PANEL_ROWS ? s + 1 : s);
        const int64_t stride = kt_panel_tiles(bits, &next, w->k, block) - kt_panel_tiles(bits, &panel, w->k, block);
        for (int64_t i = 0; i < count * bits / 16; i++, tiles += KT_TILE_BYTES) {
            prefetch(tiles, KT_TILE_BYTES, stride);
            unpack_tiles(kernels, tiles, rows + i * 64);
        }
        if (bits == 4) spread_nibbles(rows);
        for (int64_t i = 0; i < count; i++)
            kernels->interleave(1, rows + i * KT_PANEL_ROWS, COLUMNS, KT_HALF_ROWS,
                                (const float *)w->scales + s * KT_PANEL_ROWS, s * KT_HALF_ROWS,
                                panels + i * KT_PANEL_ROWS * w->n);
    }
}

void kt_transpose_panels(const kt_kernels *kernels, const kt_matrix *w, int64_t first, int64_t count, uint16_t *panels,
                         uint16_t *chunk) {
    enum { PITCH = KT_PANEL_ROWS * 2 }; /* bytes of a row of a block */
    if (w->format->arithmetic == &kt_int8_arithmetic) {
        transpose_integers(kernels, w, first, count, panels, (uint8_t *)chunk);
        return;
    }
    uint8_t *rows = (uint8_t *)(chunk + KT_PANEL_ROWS * COLUMNS);
    float scale[COLUMNS];
    for (int64_t s = 0; s < w->n / KT_PANEL_ROWS; s++) {
        kt_bf16_panel panel = kt_get_bf16_panel(w->format, w->codes, w->scales, w->k, s);
        const uint8_t *values = panel.codes + first * KT_PANEL_ROWS * panel.bits / 8;
        const int64_t block_bytes = KT_TILE_BYTES * panel.bits / 16;
        if (panel.chunk) {
            prefetch(values, count * block_bytes, w->k * KT_PANEL_ROWS * panel.bits / 8);
            panel.chunk(kernels, &panel, first, count * KT_PANEL_ROWS, chunk);
            values = (const uint8_t *)chunk;
        }
        if (panel.scale) panel.scale(kernels, &panel, first, count * KT_PANEL_ROWS, scale);
        for (int64_t i = 0; i < count; i++) {
            uint16_t *out = panels + i * KT_PANEL_ROWS * w->n;
            if (!panel.chunk) prefetch(values, block_bytes, w->k * KT_PANEL_ROWS * panel.bits / 8);
            if (!panel.scale) {
                kernels->transpose_tile(values, (uint8_t *)kt_panel_line(out, s * KT_HALF_ROWS));
                values += KT_TILE_BYTES;
                continue;
            }
            for (int half = 0; half < 2; half++, values += KT_HALF_BYTES)
                kernels->transpose(4, values, 64, KT_HALF_ROWS, KT_HALF_ROWS, rows + half * KT_HALF_ROWS * PITCH,
                                   PITCH);
            kernels->interleave(2, rows, PITCH, KT_HALF_ROWS, scale + i * KT_PANEL_ROWS, s * KT_HALF_ROWS, out);
        }
    }
}
