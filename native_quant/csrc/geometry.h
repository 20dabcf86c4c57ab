/* The layout of the codes of a packed weight (bytes.md, Tiles): row blocks, column blocks, panels of 32 rows, tiles,
 * halves. */
#ifndef KT_GEOMETRY_H
#define KT_GEOMETRY_H

#include <stddef.h>
#include <stdint.h>

enum {
    KT_PANEL_ROWS = 32, /* rows of a tile */
    KT_HALF_ROWS = 16,  /* rows of a half tile */
    KT_HALF_BYTES = 1024,
    KT_TILE_BYTES = 2048,
    KT_K_BLOCK = 3584, /* columns of a column block */
};

/* The constants for each number of bits: n is a multiple of block_rows, k of tile_columns; code * unit * scale is the
 * weight. */
typedef struct {
    int64_t block_rows, tile_columns;
    int unit;
} kt_geometry;

/* Indexed by bits. A new layout is a new row. */
static const kt_geometry kt_geometries[] = {
    [4] = {128, 128, 16},
    [8] = {64, 64, 1},
};
enum { KT_MAX_BITS = sizeof kt_geometries / sizeof kt_geometries[0] - 1 };

/* The row for a number of bits that kt_check_shape accepts. */
static inline const kt_geometry *kt_get_geometry(int bits) {
    return &kt_geometries[bits];
}

/* Codes are -largest..largest; the smallest two's complement number is not used. */
static inline int kt_largest_code(int bits) {
    return (1 << (bits - 1)) - 1;
}

/* KTQ_OK if a weight [n, k] can be packed with this many bits, else KTQ_EINVAL or KTQ_ESHAPE. */
int kt_check_shape(int bits, int64_t n, int64_t k);

/* 32 rows of a packed weight. block: address of their row block; row: their first row, counted from the block's
 * first. */
typedef struct {
    const uint8_t *block;
    int64_t row;
} kt_panel;

/* Offset of the byte of row r, column j in a half tile of 16 rows of 64 bytes. An INT4 byte has columns j and j +
 * 64. */
static inline int64_t kt_half_byte_offset(int64_t r, int64_t j) {
    return j / 4 * 64 + r * 4 + j % 4;
}

/* Panel number `index` of a packed weight [n, k]. */
static inline kt_panel kt_get_panel(int bits, const void *weight, int64_t k, int64_t index) {
    int64_t block_rows = kt_get_geometry(bits)->block_rows, row = index * KT_PANEL_ROWS;
    return (kt_panel){(const uint8_t *)weight + row / block_rows * block_rows * k * bits / 8, row % block_rows};
}

/* The tiles of a panel's columns first .. end of the column block, one after the other. first: a multiple of
 * KT_K_BLOCK. */
static inline const uint8_t *kt_panel_tiles(int bits, const kt_panel *panel, int64_t k, int64_t first) {
    int64_t block_rows = kt_get_geometry(bits)->block_rows, columns = k - first < KT_K_BLOCK ? k - first : KT_K_BLOCK;
    return panel->block + (first * block_rows + panel->row * columns) * bits / 8;
}

/* Bytes of a panel's first column block. */
static inline int64_t kt_first_block_bytes(int bits, int64_t k) {
    return (k < KT_K_BLOCK ? k : KT_K_BLOCK) * KT_PANEL_ROWS * bits / 8;
}

/* The half tiles of rows row .. row + 15, in the column block that begins at `first`. They are KT_TILE_BYTES apart. */
static inline uint8_t *kt_half_tiles(int bits, uint8_t *weight, int64_t k, int64_t row, int64_t first) {
    kt_panel panel = kt_get_panel(bits, weight, k, row / KT_PANEL_ROWS);
    int64_t tiles = kt_panel_tiles(bits, &panel, k, first) - weight;
    return weight + tiles + row % KT_PANEL_ROWS / KT_HALF_ROWS * KT_HALF_BYTES;
}

#endif
