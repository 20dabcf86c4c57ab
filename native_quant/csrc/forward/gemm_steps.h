/* The loops of a 256-bit kernel for dot products (gemm_steps.c), and the steps that each instruction set defines.
 *
 * - few tokens (at most KT_FEW): memory is the limit. Each weight is read once, from two panels in turn, and multiplied
 *   without being stored.
 * - many tokens: arithmetic is the limit. A chunk of a panel is unpacked to 16 KiB, which stay in L1, and multiplied
 *   with blocks of up to KT_FEW tokens; the chunk's activations of all tokens stay in L2.
 *
 * Some instructions multiply unsigned with signed bytes. Then code + offset is multiplied, which is unsigned, and the
 * sums begin with -offset * (sum of the token's activations) instead of 0. */
#ifndef KT_GEMM_STEPS_H
#define KT_GEMM_STEPS_H

#include "kernels.h"

enum {
    KT_FEW = 6,             /* tokens of a block: their sums take 12 of 16 registers */
    KT_CODES_BYTES = 16384, /* bytes of an unpacked chunk */
    KT_CHUNK_PITCH = 512,   /* bytes between the activations of two tokens in a chunk */
};

/* Adds to c[panel][token * 32 + row] the products of `columns` columns, at most KT_K_BLOCK, of one or two panels with
   activations KT_K_BLOCK bytes apart. */
typedef void kt_few_fn(int64_t panels, const uint8_t *const *tiles, int64_t columns, const int8_t *a,
                       int32_t *const *c);
/* Unpacks tiles to the codes that `block` reads. */
typedef void kt_unpack_fn(const uint8_t *tiles, int64_t columns, uint8_t *codes);
/* Copies a token's activations in the form that `block` reads. */
typedef void kt_copy_fn(const int8_t *a, int64_t columns, int8_t *out);
/* Adds to c[token * 32 + row] the products of `columns` unpacked columns with activations KT_CHUNK_PITCH bytes apart.
   Meanwhile prefetches the tiles that are unpacked next: `step` bytes for each 8 columns of 16 rows. */
typedef void kt_block_fn(const uint8_t *codes, int64_t columns, const int8_t *a, int32_t *c, const uint8_t *prefetch,
                         int64_t step);

typedef struct {
    int bits;
    int32_t offset;
    int64_t chunk;          /* columns of a chunk; divides KT_K_BLOCK */
    kt_few_fn *few[KT_FEW]; /* [tokens - 1] */
    kt_unpack_fn *unpack;
    kt_copy_fn *copy;
    kt_block_fn *block[KT_FEW]; /* [tokens - 1] */
} kt_gemm_steps;

/* Adds the products of a job to its sums: reads each weight once, from two panels in turn. */
void kt_gemm_few(const kt_gemm *job, int bits, kt_few_fn *few);
/* Runs a job whose tiles of activations have one row. Returns the weight's unit. */
int kt_gemm_in_steps(const kt_gemm *job, const kt_gemm_steps *steps);

#define KT_INLINE static inline __attribute__((always_inline))

/* Defines few[N - 1] of a table from an inline function part_few(tokens, part, a, c) for one of the PARTS of a tile. Each
   function begins on a cache line: at other addresses, block of AVX-VNNI and INT8 took 3 to 7 % longer (Emerald
   Rapids). */
#define KT_ON_A_LINE __attribute__((aligned(64)))
#define KT_DEFINE_FEW(N, TARGET, TILE_COLUMNS)                                                                         \
    TARGET KT_ON_A_LINE static void few_##N(int64_t panels, const uint8_t *const *tiles, int64_t columns,              \
                                            const int8_t *a, int32_t *const *c) {                                      \
        for (int64_t j = 0; j < columns; j += (TILE_COLUMNS))                                                          \
            for (int part = 0; part < PARTS; part++)                                                                   \
                for (int64_t s = 0; s < panels; s++)                                                                   \
                    part_few(N, tiles[s] + j / (TILE_COLUMNS) * KT_TILE_BYTES + part * KT_HALF_BYTES, a + j,           \
                             c[s] + part * KT_HALF_ROWS);                                                              \
    }
#define KT_DEFINE_ALL_FEW(TARGET, TILE_COLUMNS)                                                                        \
    KT_DEFINE_FEW(1, TARGET, TILE_COLUMNS)                                                                             \
    KT_DEFINE_FEW(2, TARGET, TILE_COLUMNS) KT_DEFINE_FEW(3, TARGET, TILE_COLUMNS)                                      \
        KT_DEFINE_FEW(4, TARGET, TILE_COLUMNS) KT_DEFINE_FEW(5, TARGET, TILE_COLUMNS)                                  \
            KT_DEFINE_FEW(6, TARGET, TILE_COLUMNS)
#define KT_ALL(name) {name##_1, name##_2, name##_3, name##_4, name##_5, name##_6}

#endif
