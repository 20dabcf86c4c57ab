/* The code shared by the dot products of AVX-512. A file that includes this must define
 *
 *     TARGET, BITS           the attribute of its functions; 8 or 4
 *     OFFSET                 multiply() multiplies code + OFFSET, so the sums begin with -OFFSET * (sum of the
 * activations) low_codes, high_codes  64 bytes of a tile -> 64 codes; INT4: of the columns 0..63 and of the
 * columns 64..127 multiply               adds to 16 sums the products of 16 rows * 4 codes with four activations load,
 * rest, store      how sums come from memory, what is done with them every 4 quads, and how they get back there
 *
 * A kernel multiplies up to 12 tokens by a strip (24 registers of sums), or up to 6 by two strips, which are two
 * streams from memory. Up to 12 tokens, memory is the limit: each strip is read once, column block by column block.
 * With more tokens arithmetic is: CHUNK columns of a strip are multiplied by one block of tokens after the other and
 * stay in L1 meanwhile. */
#ifndef KT_GEMM_AVX512_KERNEL_H
#define KT_GEMM_AVX512_KERNEL_H

#include "gemm_avx512.h"

enum {
    CHUNK = 4096 / BITS,         /* columns: 16 KiB of a strip */
    BLOCK = 12,                  /* tokens */
    BLOCK_TWO = 6,               /* tokens that are multiplied by two strips at once */
    BLOCK_BYTES = BLOCK * CHUNK, /* activations of a block and a chunk */
    GROUP = KT_GEMM_SCRATCH / BLOCK_BYTES * BLOCK, /* tokens whose activations of a chunk fit into the scratch memory */
    AHEAD = 4096,                /* bytes: a page. 1024 and 8192 are up to 4 % slower, fetching into L2 only 4 % */
};

/* A strip. ahead: what is needed next; for each 128 bytes of weights `step` bytes of it are fetched into L1, in the
   order in which they lie there: with two halves of a tile fetched side by side memory gives a tenth less. */
typedef struct {
    const uint8_t *tiles, *ahead;
    int32_t *c;
} stream;

/* Adds to c[token * 32 + row] of each stream the products of `columns` columns. a: chunk by chunk, in each the rows of
 * the tokens. */
typedef void kernel_fn(const stream *streams, int64_t columns, const int8_t *a, int64_t step);

/* Keeps the compiler from adding the products of several quads in a tree, for which there are too few registers. */
KT_INLINE TARGET __m512i in_turn(__m512i sum) {
    __asm__("" : "+v"(sum));
    return sum;
}

KT_INLINE TARGET void kernel(int strips, int tokens, const stream *streams, int64_t columns, const int8_t *a,
                             int64_t step) {
    __m512i sum[2][BLOCK][2];
    const uint8_t *tiles[2] = {streams[0].tiles, streams[strips - 1].tiles};
    const uint8_t *ahead[2] = {streams[0].ahead, streams[strips - 1].ahead};
    int32_t *c[2] = {streams[0].c, streams[strips - 1].c};
#pragma GCC unroll 2
    for (int s = 0; s < strips; s++)
#pragma GCC unroll 12
        for (int t = 0; t < tokens; t++)
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) sum[s][t][h] = load(c[s] + t * KT_STRIP_ROWS + h * 16);
    for (int64_t j = 0; j < columns; j += 512 / BITS, a += 512 / BITS) {
        if (j && j % CHUNK == 0) a += BLOCK_BYTES - CHUNK;
        for (int quads = 0; quads < 16; quads += 4) {
#pragma GCC unroll 4
            for (int q = quads; q < quads + 4; q++)
#pragma GCC unroll 2
                for (int s = 0; s < strips; s++) {
                    const int8_t *four = a + 4 * q;
                    __m512i bytes[2], codes[2];
#pragma GCC unroll 2
                    for (int h = 0; h < 2; h++) {
                        bytes[h] = _mm512_loadu_si512(tiles[s] + h * KT_HALF_BYTES + q * 64);
                        _mm_prefetch((const char *)ahead[s] + h * (step / 2), _MM_HINT_T0);
                        codes[h] = low_codes(bytes[h]);
                    }
                    ahead[s] += step;
                    __asm__("" ::
                                : "memory"); /* activations are to be loaded again for each strip, not to be kept in
                                                registers */
#pragma GCC unroll 12
                    for (int t = 0; t < tokens; t++)
#pragma GCC unroll 2
                        for (int h = 0; h < 2; h++)
                            sum[s][t][h] = in_turn(multiply(sum[s][t][h], codes[h], four + t * CHUNK));
                    if (BITS == 8) continue;
#pragma GCC unroll 2
                    for (int h = 0; h < 2; h++) codes[h] = high_codes(bytes[h]);
#pragma GCC unroll 12
                    for (int t = 0; t < tokens; t++)
#pragma GCC unroll 2
                        for (int h = 0; h < 2; h++)
                            sum[s][t][h] = in_turn(multiply(sum[s][t][h], codes[h], four + t * CHUNK + 64));
                }
#pragma GCC unroll 2
            for (int s = 0; s < strips; s++)
#pragma GCC unroll 12
                for (int t = 0; t < tokens; t++)
#pragma GCC unroll 2
                    for (int h = 0; h < 2; h++) sum[s][t][h] = rest(sum[s][t][h], c[s] + t * KT_STRIP_ROWS + h * 16);
        }
        tiles[0] += KT_TILE_BYTES;
        tiles[1] += KT_TILE_BYTES;
    }
#pragma GCC unroll 2
    for (int s = 0; s < strips; s++)
#pragma GCC unroll 12
        for (int t = 0; t < tokens; t++)
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) store(c[s] + t * KT_STRIP_ROWS + h * 16, sum[s][t][h]);
}

#define KERNELS(X)                                                                                                     \
    X(1, 1)                                                                                                            \
    X(1, 2) X(1, 3) X(1, 4) X(1, 5) X(1, 6) X(1, 7) X(1, 8) X(1, 9) X(1, 10) X(1, 11) X(1, 12) X(2, 1) X(2, 2) X(2, 3) \
        X(2, 4) X(2, 5) X(2, 6)
#define DEFINE(S, T)                                                                                                   \
    TARGET static void kernel_##S##_##T(const stream *streams, int64_t columns, const int8_t *a, int64_t step) {       \
        kernel(S, T, streams, columns, a, step);                                                                       \
    }
KERNELS(DEFINE)
#undef DEFINE
#define NAME(S, T) [S][T] = kernel_##S##_##T,
static kernel_fn *const kernels[3][BLOCK + 1] = {KERNELS(NAME)};
#undef NAME
#undef KERNELS

TARGET static void begin_sums(const kt_gemm *job) {
    int64_t blocks = (job->k + KT_K_BLOCK - 1) / KT_K_BLOCK;
    for (int64_t t = 0; t < job->m; t++) {
        int32_t sum = 0;
        for (int64_t b = 0; b < blocks; b++) sum += job->sums[t * job->sums_pitch + b];
        __m512i first = _mm512_set1_epi32(-OFFSET * sum);
        for (int64_t s = 0; s < job->strips; s++) {
            int32_t *c = job->c + s * job->c_pitch + t * KT_STRIP_ROWS;
            _mm512_store_si512(c, first);
            _mm512_store_si512(c + 16, first);
        }
    }
}

/* Copies what a kernel reads: rows that lie pitches of 4096 bytes apart would push each other out of L1. */
TARGET static void copy_activations(const kt_gemm *job, int64_t first, int64_t columns, int64_t token, int64_t tokens,
                                    int8_t *a) {
    for (int64_t t = 0; t < tokens; t++) {
        const int8_t *from = job->a + kt_in_tiles(job->tile_rows, job->k, token + t) + first * job->tile_rows;
        for (int64_t j = 0; j < columns; j += 64)
            _mm512_store_si512(a + j / CHUNK * BLOCK_BYTES + t * CHUNK + j % CHUNK, _mm512_loadu_si512(from + j * job->tile_rows));
    }
}

static int64_t least(int64_t x, int64_t y) {
    return x < y ? x : y;
}

static void multiply_few(const kt_gemm *job, int8_t *a) {
    int64_t at_once = job->m <= BLOCK_TWO ? 2 : 1;
    for (int64_t first = 0; first < job->k; first += KT_K_BLOCK) {
        int64_t columns = least(job->k - first, KT_K_BLOCK);
        copy_activations(job, first, columns, 0, job->m, a);
        for (int64_t s = 0; s < job->strips; s += at_once) {
            int64_t strips = least(at_once, job->strips - s);
            stream streams[2];
            for (int64_t i = 0; i < strips; i++) {
                const uint8_t *tiles = kt_strip_tiles(BITS, &job->strip[s + i], job->k, first);
                streams[i] = (stream){tiles, tiles + AHEAD, job->c + (s + i) * job->c_pitch};
            }
            kernels[strips][job->m](streams, columns, a, 2 * 64);
        }
    }
}

/* Tokens token .. of a chunk. next: the chunk that comes next, or this one. */
static void multiply_chunk(const kt_gemm *job, int64_t first, int64_t columns, int64_t token, int64_t tokens,
                           int64_t next, int8_t *a) {
    int64_t blocks = (tokens + BLOCK - 1) / BLOCK, step = 128 / blocks;
    for (int64_t b = 0; b < blocks; b++) {
        int64_t from = tokens * b / blocks, to = tokens * (b + 1) / blocks;
        copy_activations(job, first, columns, token + from, to - from, a + b * BLOCK_BYTES);
    }
    for (int64_t s = 0; s < job->strips; s++) {
        const uint8_t *tiles = kt_chunk_tiles(job, BITS, s, first);
        const uint8_t *ahead =
            s + 1 < job->strips ? kt_chunk_tiles(job, BITS, s + 1, first) : kt_chunk_tiles(job, BITS, 0, next);
        for (int64_t b = 0; b < blocks; b++, ahead += columns * KT_STRIP_ROWS * BITS / 8 / blocks) {
            int64_t from = tokens * b / blocks, to = tokens * (b + 1) / blocks;
            kernels[1][to - from](&(stream){tiles, ahead, job->c + s * job->c_pitch + (token + from) * KT_STRIP_ROWS},
                                  columns, a + b * BLOCK_BYTES, step);
        }
    }
}

static void multiply_many(const kt_gemm *job, int8_t *a) {
    int64_t groups = (job->m + GROUP - 1) / GROUP;
    for (int64_t first = 0, next; first < job->k; first = next) {
        next = least(job->k, least(first + CHUNK, first - first % KT_K_BLOCK + KT_K_BLOCK));
        for (int64_t g = 0; g < groups; g++) {
            int64_t from = job->m * g / groups, to = job->m * (g + 1) / groups;
            multiply_chunk(job, first, next - first, from, to - from, g + 1 < groups || next == job->k ? first : next,
                           a);
        }
    }
}

static int gemm(const kt_gemm *job) {
    begin_sums(job);
    (job->m <= BLOCK ? multiply_few : multiply_many)(job, (int8_t *)job->scratch);
    return kt_geometry_of(BITS)->unit;
}

#endif
