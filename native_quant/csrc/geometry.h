/* Where the codes of a packed weight lie (FORMAT.md, Tiles): row blocks, column blocks, strips of 32 rows, tiles, halves. */
#ifndef KT_GEOMETRY_H
#define KT_GEOMETRY_H

#include <stddef.h>
#include <stdint.h>

enum {
    KT_STRIP_ROWS = 32, /* rows of a tile: what is transposed at a time */
    KT_HALF_ROWS = 16,  /* rows of a half tile: what is quantized and packed at a time */
    KT_HALF_BYTES = 1024,
    KT_TILE_BYTES = 2048,
    KT_K_BLOCK = 3584, /* columns of a column block */
};

/* What depends on the bits of a code: n is a multiple of block_rows, k of tile_columns; code * unit * scale is the weight. */
typedef struct {
    int64_t block_rows, tile_columns;
    int unit;
} kt_geometry;

/* By bits. Another layout is another row. */
static const kt_geometry kt_geometries[] = {
    [4] = {128, 128, 16},
    [8] = {64, 64, 1},
};
enum { KT_MAX_BITS = sizeof kt_geometries / sizeof kt_geometries[0] - 1 };

/* The row for a number of bits that kt_check_shape accepts. */
static inline const kt_geometry *kt_geometry_of(int bits) {
    return &kt_geometries[bits];
}

/* KTQ_OK if a weight [n, k] can be packed with this many bits, else KTQ_EINVAL or KTQ_ESHAPE. */
int kt_check_shape(int bits, int64_t n, int64_t k);

/* 32 rows of a packed weight. block: where their row block begins; row: the first of them, counted in the block. */
typedef struct {
    const uint8_t *block;
    int64_t row;
} kt_strip;

/* Strip number `index` of a packed weight [n, k]. */
static inline kt_strip kt_strip_of(int bits, const void *weight, int64_t k, int64_t index) {
    int64_t block_rows = kt_geometry_of(bits)->block_rows, row = index * KT_STRIP_ROWS;
    return (kt_strip){(const uint8_t *)weight + row / block_rows * block_rows * k * bits / 8, row % block_rows};
}

/* The tiles of a strip's columns first .. end of the column block, one after the other. first: a multiple of KT_K_BLOCK. */
static inline const uint8_t *kt_strip_tiles(int bits, const kt_strip *strip, int64_t k, int64_t first) {
    int64_t block_rows = kt_geometry_of(bits)->block_rows, columns = k - first < KT_K_BLOCK ? k - first : KT_K_BLOCK;
    return strip->block + (first * block_rows + strip->row * columns) * bits / 8;
}

#endif
