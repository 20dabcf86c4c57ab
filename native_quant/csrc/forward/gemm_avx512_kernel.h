/* The code shared by the dot products of AVX-512. A file that includes this must define
 *
 *     TARGET, BITS           the attribute of its functions; 8 or 4
 *     OFFSET                 multiply() multiplies code + OFFSET, so the sums begin with
 *                            -OFFSET * (sum of the activations)
 *     low_codes, high_codes  64 bytes of a tile -> 64 codes; INT4: of the columns 0..63 and of the columns 64..127
 *     multiply               adds to 16 sums the products of 16 rows * 4 codes with four activations
 *     load, rest, store      load sums from memory, process them after every 4 quads, store them
 *
 * A kernel multiplies up to 12 tokens with a chunk of a panel (24 registers of sums), or up to 5 tokens with chunks of
 * two panels. Up to 12 tokens, memory is the limit: each panel is read once, chunk by chunk. With more tokens
 * arithmetic is the limit: a chunk is multiplied with one block of tokens after the other. If the codes have to be
 * unpacked, the first block stores them in the scratch memory for the others, where they stay in L1; unpacking is a
 * tenth of an int4 kernel's work.
 *
 * Memory is fastest when several pages are read at once. So while a chunk is multiplied, the next one is prefetched in
 * up to four places. The next chunk is in the same panel, or the first of the next panel, of the next columns or of the
 * next call.
 *
 * An L1 of 32 KiB does not hold two chunks. There, chunks are prefetched into L2. There and on AMD's processors, weights
 * are read in the order of their bytes if there are few tokens (Zen 4: 1.6 to 2.4 times as fast with one token, Zen 5:
 * 1.2 times). */
#ifndef KT_GEMM_AVX512_KERNEL_H
#define KT_GEMM_AVX512_KERNEL_H

#include "gemm_avx512.h"
#include "gemm_steps.h"
#include "reading.h"

enum {
    BLOCK = 12,    /* most tokens of a kernel */
    BLOCK_TWO = 5, /* most tokens of a kernel for two panels */
    TILE_COLUMNS = 512 / BITS,
    TILES = 8,                               /* most packed tiles of a chunk: 16 KiB */
    TILES_TWO = 4,                           /* the same for each of two panels */
    CHUNK = BITS == 4 ? 768 : 512,           /* columns of a chunk for several blocks of tokens: 12 or 16 KiB */
    STORES_CODES = BITS == 4 || OFFSET != 0, /* not if the codes are the bytes of the tiles */
    CODES_BYTES = STORES_CODES ? CHUNK * KT_PANEL_ROWS : 0, /* one byte for each code of such a chunk */
    GROUP = (KT_GEMM_SCRATCH - CODES_BYTES) / CHUNK, /* tokens whose activations fit into the scratch memory, too */
    PAGE = 4096,
};

/* Kinds of kernels.
 *     ONE    reads a chunk of one panel
 *     TWO    reads a chunk of each of two panels
 *     FIRST  reads a chunk of one panel, and stores its codes
 *     AGAIN  reads the codes that FIRST has stored */
enum { ONE, TWO, FIRST, AGAIN };

/* A chunk. For every four lines that are multiplied, four lines are prefetched: at prefetch, prefetch + one, prefetch +
 * two and prefetch + one + two; then `prefetch` moves by step. */
typedef struct {
    const uint8_t *tiles, *prefetch;
    int64_t one, two, step;
    int32_t *c;
    uint8_t *codes; /* stored codes (FIRST, AGAIN) */
} stream;

/* Returns a chunk that prefetches `bytes` bytes in 4 or 2 places, which is 12 to 20 % faster than in one place from 7
 * tokens on (Emerald Rapids). */
KT_INLINE stream make_stream(const uint8_t *tiles, const uint8_t *prefetch, int64_t bytes, int32_t *c) {
    if (bytes >= 4 * PAGE) return (stream){tiles, prefetch, bytes / 4, bytes / 2, 64, c, NULL};
    if (bytes > PAGE) return (stream){tiles, prefetch, bytes / 2, 64, 128, c, NULL};
    return (stream){tiles, prefetch, 64, 128, 256, c, NULL};
}

/* Adds to c[token * 32 + row] of each stream the products of some packed tiles. a: [columns / 64][tokens][64]. */
typedef void kernel_fn(const stream *streams, int64_t count, const int8_t *a);

/* Keeps the compiler from adding the products of several quads in a tree, for which there are too few registers. */
KT_INLINE TARGET __m512i keep_order(__m512i sum) {
    __asm__("" : KT_IN_REGISTER(sum));
    return sum;
}

/* Returns the codes of quad q and half h of a tile; INT4: those of columns from 64 on if `high`. stored_codes: codes of
 * the tile, which FIRST writes and AGAIN reads. */
KT_INLINE TARGET __m512i get_codes(int kind, int high, __m512i bytes, uint8_t *stored_codes, int q, int h) {
    int64_t place = (q * 8 / BITS + high) * 128 + h * 64;
    if (kind == AGAIN) return _mm512_load_si512(stored_codes + place);
    __m512i codes = high ? high_codes(bytes) : low_codes(bytes);
    if (kind == FIRST) _mm512_store_si512(stored_codes + place, codes);
    return codes;
}

/* into_l2: prefetches into L2, which takes up to 4 % longer than into L1 if L1 is large enough (Emerald Rapids). */
KT_INLINE TARGET void kernel(int into_l2, int kind, int tokens, const stream *streams, int64_t count, const int8_t *a) {
    int panels = kind == TWO ? 2 : 1;
    __m512i sum[2][BLOCK][2];
    const uint8_t *tiles[2] = {streams[0].tiles, streams[panels - 1].tiles};
    const uint8_t *prefetch[2] = {streams[0].prefetch, streams[panels - 1].prefetch};
    int64_t one = streams[0].one, two = streams[0].two, step = streams[0].step;
    int32_t *c[2] = {streams[0].c, streams[panels - 1].c};
    uint8_t *stored_codes = streams[0].codes;
#pragma GCC unroll 2
    for (int s = 0; s < panels; s++)
#pragma GCC unroll 12
        for (int t = 0; t < tokens; t++)
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) sum[s][t][h] = load(c[s] + t * KT_PANEL_ROWS + h * 16);
    for (int64_t i = 0; i < count; i++, a += tokens * TILE_COLUMNS) {
        for (int quads = 0; quads < 16; quads += 4) {
#pragma GCC unroll 4
            for (int q = quads; q < quads + 4; q++)
#pragma GCC unroll 2
                for (int s = 0; s < panels; s++) {
                    const int8_t *four = a + 4 * q;
                    __m512i bytes[2], codes[2];
#pragma GCC unroll 2
                    for (int h = 0; h < 2; h++) {
                        bytes[h] = _mm512_loadu_si512(tiles[s] + h * KT_HALF_BYTES + q * 64);
                        const char *line = (const char *)prefetch[s] + q % 2 * two + h * one;
                        if (into_l2) _mm_prefetch(line, _MM_HINT_T1);
                        else _mm_prefetch(line, _MM_HINT_T0);
                        codes[h] = get_codes(kind, 0, bytes[h], stored_codes, q, h);
                    }
                    prefetch[s] += q % 2 * step;
                    __asm__("" ::: "memory"); /* loads activations again for each panel instead of keeping registers */
#pragma GCC unroll 12
                    for (int t = 0; t < tokens; t++)
#pragma GCC unroll 2
                        for (int h = 0; h < 2; h++)
                            sum[s][t][h] = keep_order(multiply(sum[s][t][h], codes[h], four + t * 64));
                    if (BITS == 8) continue;
#pragma GCC unroll 2
                    for (int h = 0; h < 2; h++) codes[h] = get_codes(kind, 1, bytes[h], stored_codes, q, h);
#pragma GCC unroll 12
                    for (int t = 0; t < tokens; t++)
#pragma GCC unroll 2
                        for (int h = 0; h < 2; h++)
                            sum[s][t][h] = keep_order(multiply(sum[s][t][h], codes[h], four + (tokens + t) * 64));
                }
#pragma GCC unroll 2
            for (int s = 0; s < panels; s++)
#pragma GCC unroll 12
                for (int t = 0; t < tokens; t++)
#pragma GCC unroll 2
                    for (int h = 0; h < 2; h++) sum[s][t][h] = rest(sum[s][t][h], c[s] + t * KT_PANEL_ROWS + h * 16);
        }
        if (kind == FIRST || kind == AGAIN) stored_codes += 8 / BITS * KT_TILE_BYTES;
        tiles[0] += KT_TILE_BYTES;
        tiles[1] += KT_TILE_BYTES;
    }
#pragma GCC unroll 2
    for (int s = 0; s < panels; s++)
#pragma GCC unroll 12
        for (int t = 0; t < tokens; t++)
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) store(c[s] + t * KT_PANEL_ROWS + h * 16, sum[s][t][h]);
}

#define UP_TO_5(X, L2, KIND) X(L2, KIND, 1) X(L2, KIND, 2) X(L2, KIND, 3) X(L2, KIND, 4) X(L2, KIND, 5)
#define FROM_6(X, L2, KIND)                                                                                            \
    X(L2, KIND, 6)                                                                                                     \
    X(L2, KIND, 7) X(L2, KIND, 8) X(L2, KIND, 9) X(L2, KIND, 10) X(L2, KIND, 11) X(L2, KIND, 12)
#define KERNELS(X, L2)                                                                                                 \
    UP_TO_5(X, L2, ONE) FROM_6(X, L2, ONE) UP_TO_5(X, L2, TWO) FROM_6(X, L2, FIRST) FROM_6(X, L2, AGAIN)
#define DEFINE(L2, KIND, T)                                                                                            \
    TARGET static void kernel_##L2##_##KIND##_##T(const stream *streams, int64_t count, const int8_t *a) {             \
        kernel(L2, KIND, T, streams, count, a);                                                                        \
    }
KERNELS(DEFINE, 0) KERNELS(DEFINE, 1)
#define NAME(L2, KIND, T) [KIND][T] = kernel_##L2##_##KIND##_##T,
static kernel_fn *const kernels[2][AGAIN + 1][BLOCK + 1] = {{KERNELS(NAME, 0)}, {KERNELS(NAME, 1)}};

TARGET static void begin_sums(const kt_gemm *job) {
    int64_t blocks = (job->k + KT_K_BLOCK - 1) / KT_K_BLOCK;
    for (int64_t t = 0; t < job->m; t++) {
        int32_t sum = 0;
        for (int64_t b = 0; b < blocks; b++) sum += job->sums[t * job->sums_pitch + b];
        __m512i first = _mm512_set1_epi32(-OFFSET * sum);
        for (int64_t s = 0; s < job->panels; s++) {
            int32_t *c = job->c + s * job->c_pitch + t * KT_PANEL_ROWS;
            _mm512_store_si512(c, first);
            _mm512_store_si512(c + 16, first);
        }
    }
}

/* Copies activations for a kernel: [columns / 64][tokens][64]. */
TARGET static void copy_activations(const kt_gemm *job, int64_t first, int64_t columns, int64_t token, int64_t tokens,
                                    int8_t *a) {
    for (int64_t t = 0; t < tokens; t++) {
        const int8_t *from = job->a + kt_tile_offset(job->tile_rows, job->k, token + t) + first * job->tile_rows;
        for (int64_t j = 0; j < columns; j += 64)
            _mm512_store_si512(a + (j / 64 * tokens + t) * 64, _mm512_loadu_si512(from + j * job->tile_rows));
    }
}

/* Tiles of a chunk if the packed tiles of a panel are divided into equal chunks of at most `most` tiles. */
static int64_t even_chunk(int64_t tiles, int64_t most) {
    int64_t chunks = (tiles + most - 1) / most;
    return (tiles + chunks - 1) / chunks;
}

/* The columns of the column block that begins at `first`. */
static int64_t columns_from(const kt_gemm *job, int64_t first) {
    return kt_least(job->k - first, KT_K_BLOCK);
}

/* The tiles that are read after the column block `first` of panel s, if `at_once` panels are read at once. After the
 * last panel come those of the next call or, if that is unknown, the next panel of the weight. */
static const uint8_t *next_tiles(const kt_gemm *job, int64_t s, int64_t first, int64_t at_once) {
    int64_t columns = columns_from(job, first);
    if (s + at_once < job->panels) return kt_panel_tiles(BITS, &job->panel[s + at_once], job->k, first);
    if (first + columns < job->k) return kt_panel_tiles(BITS, &job->panel[s % at_once], job->k, first + columns);
    if (job->next && s % at_once == 0) return job->next;
    return kt_panel_tiles(BITS, &job->panel[s], job->k, first) + columns / TILE_COLUMNS * KT_TILE_BYTES;
}

static void multiply_few(const kt_gemm *job) {
    int8_t *a = (int8_t *)job->scratch;
    int64_t at_once = job->m <= BLOCK_TWO ? 2 : 1;
    for (int64_t first = 0, columns; first < job->k; first += columns) {
        columns = columns_from(job, first);
        copy_activations(job, first, columns, 0, job->m, a);
        int64_t all = columns / TILE_COLUMNS, chunk = even_chunk(all, at_once == 2 ? TILES_TWO : TILES);
        for (int64_t s = 0; s < job->panels; s += at_once) {
            int64_t panels = kt_least(at_once, job->panels - s);
            for (int64_t done = 0, count; done < all; done += count) {
                stream streams[2];
                count = kt_least(chunk, all - done);
                for (int64_t i = 0; i < panels; i++) {
                    int64_t remaining = all - done - count, next = remaining ? kt_least(chunk, remaining) : chunk;
                    const uint8_t *tiles =
                        kt_panel_tiles(BITS, &job->panel[s + i], job->k, first) + done * KT_TILE_BYTES;
                    const uint8_t *prefetch =
                        remaining ? tiles + count * KT_TILE_BYTES : next_tiles(job, s + i, first, at_once);
                    streams[i] = make_stream(tiles, prefetch, next * KT_TILE_BYTES, job->c + (s + i) * job->c_pitch);
                }
                kernel_fn *run = kernels[!kt_reads.in_turn][panels == 2 ? TWO : ONE][job->m];
                run(streams, count, a + done * TILE_COLUMNS * job->m);
            }
        }
    }
}

/* Multiplies `tokens` tokens with a chunk of all panels. prefetch: what is read after the last panel. */
static void multiply_chunk(const kt_gemm *job, int64_t first, int64_t columns, int64_t token, int64_t tokens,
                           const uint8_t *prefetch) {
    int8_t *a = (int8_t *)job->scratch + CODES_BYTES;
    int64_t blocks = (tokens + BLOCK - 1) / BLOCK, count = columns / TILE_COLUMNS;
    for (int64_t b = 0; b < blocks; b++) {
        int64_t from = tokens * b / blocks, to = tokens * (b + 1) / blocks;
        copy_activations(job, first, columns, token + from, to - from, a + from * columns);
    }
    for (int64_t s = 0; s < job->panels; s++) {
        stream chunk = make_stream(kt_chunk_tiles(job, BITS, s, first),
                                   s + 1 < job->panels ? kt_chunk_tiles(job, BITS, s + 1, first) : prefetch,
                                   count * KT_TILE_BYTES, NULL);
        chunk.codes = job->scratch;
        const uint8_t *next = chunk.prefetch;
        int64_t bytes = count * 8 * chunk.step; /* bytes to prefetch in each place; divided among the blocks */
        chunk.step = (chunk.step + blocks - 1) / blocks;
        for (int64_t b = 0; b < blocks; b++) {
            int64_t from = tokens * b / blocks, to = tokens * (b + 1) / blocks;
            chunk.prefetch = next + bytes * b / blocks;
            chunk.c = job->c + s * job->c_pitch + (token + from) * KT_PANEL_ROWS;
            kernel_fn *run = kernels[!kt_reads.in_turn][!STORES_CODES ? ONE : b ? AGAIN : FIRST][to - from];
            run(&chunk, count, a + from * columns);
        }
    }
}

static void multiply_many(const kt_gemm *job) {
    int64_t groups = (job->m + GROUP - 1) / GROUP;
    for (int64_t first = 0, columns; first < job->k; first += columns) {
        int64_t in_block = first % KT_K_BLOCK, all = columns_from(job, first - in_block) - in_block;
        columns = even_chunk(all / TILE_COLUMNS, CHUNK / TILE_COLUMNS) * TILE_COLUMNS;
        for (int64_t g = 0; g < groups; g++) {
            int64_t from = job->m * g / groups, to = job->m * (g + 1) / groups;
            const uint8_t *prefetch = g + 1 < groups             ? kt_chunk_tiles(job, BITS, 0, first)
                                      : first + columns < job->k ? kt_chunk_tiles(job, BITS, 0, first + columns)
                                      : job->next                ? job->next
                                                                 : kt_chunk_tiles(job, BITS, 0, first);
            multiply_chunk(job, first, columns, from, to - from, prefetch);
        }
    }
}

enum {
    PARTS = 1,                      /* parts of a tile that are read from each of two panels in turn */
    PREFETCHED = BITS == 8 ? 6 : 2, /* tokens from which on the processor's own prefetching does not suffice */
    INTO_L2_AHEAD = 5120,           /* bytes between codes that are multiplied and those prefetched into L2 */
    INTO_L1_AHEAD = 4608,           /* the same for L1, which is faster with any number of tokens if L1 has 48 KiB */
    /* INT4: 6 tokens are faster in kernels of one panel then. */
    MOST_IN_ORDER = BITS == 8 ? KT_FEW : KT_FEW - 1,
};

/* Adds the products of a tile, in the order of its bytes. a: [tokens][KT_K_BLOCK]. */
KT_INLINE TARGET void part_few(int tokens, const uint8_t *tile, const int8_t *a, int32_t *c) {
    const int into_l1 = kt_reads.in_turn;
#pragma GCC unroll 1
    for (int h = 0; h < 2; h++, tile += KT_HALF_BYTES, c += KT_HALF_ROWS) {
        __m512i sum[KT_FEW];
#pragma GCC unroll 6
        for (int t = 0; t < tokens; t++) sum[t] = load(c + t * KT_PANEL_ROWS);
#pragma GCC unroll 1
        for (int quads = 0; quads < 16; quads += 4) {
#pragma GCC unroll 4
            for (int q = quads; q < quads + 4; q++) {
                __m512i bytes = _mm512_loadu_si512(tile + q * 64), codes = low_codes(bytes);
                if (into_l1) _mm_prefetch((const char *)tile + q * 64 + INTO_L1_AHEAD, _MM_HINT_T0);
                else if (tokens >= PREFETCHED)
                    _mm_prefetch((const char *)tile + q * 64 + INTO_L2_AHEAD, _MM_HINT_T1);
#pragma GCC unroll 6
                for (int t = 0; t < tokens; t++)
                    sum[t] = keep_order(multiply(sum[t], codes, a + t * KT_K_BLOCK + 4 * q));
                if (BITS == 8) continue;
                codes = high_codes(bytes);
#pragma GCC unroll 6
                for (int t = 0; t < tokens; t++)
                    sum[t] = keep_order(multiply(sum[t], codes, a + t * KT_K_BLOCK + 64 + 4 * q));
            }
#pragma GCC unroll 6
            for (int t = 0; t < tokens; t++) sum[t] = rest(sum[t], c + t * KT_PANEL_ROWS);
        }
#pragma GCC unroll 6
        for (int t = 0; t < tokens; t++) store(c + t * KT_PANEL_ROWS, sum[t]);
    }
}

KT_DEFINE_ALL_FEW(TARGET, TILE_COLUMNS)
static kt_few_fn *const few[KT_FEW] = KT_ALL(few);

static inline int is_read_in_order(const kt_gemm *job) {
    return kt_reads.in_order && job->m <= (kt_reads.in_turn ? MOST_IN_ORDER : KT_FEW) && job->tile_rows == 1;
}

static int gemm(const kt_gemm *job) {
    begin_sums(job);
    if (is_read_in_order(job)) kt_gemm_few(job, BITS, few[job->m - 1]);
    else (job->m <= BLOCK ? multiply_few : multiply_many)(job);
    return kt_get_geometry(BITS)->unit;
}

#endif
