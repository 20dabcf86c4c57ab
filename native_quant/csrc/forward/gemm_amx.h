/* Dot products with AMX tiles: the code shared by both weight formats.
 *
 * A tile of activations has up to 16 tokens x 64 columns (kt_tiling). A tile of weights is half a packed tile (16 rows
 * x 64 columns as quads): int8 is read in place, int4 is unpacked to scratch, once for all tokens. A tile of sums is 16
 * x 16 int32. A block is two tiles of activations times the two halves of a panel: 4 products for 4 loads. With 8
 * tiles, no shape needs fewer loads: 1 x 4 has 5 loads for 4 products, 2 x 3 has 7 for 6. The last block may have one
 * tile: 2 products for 3 loads. Calls with few tokens use the AVX-512 VNNI kernel, because memory limits them.
 *
 * Order. The columns are divided into chunks of at most 1024 (32 KiB of a panel in int8; L1 has 48 KiB). With more than
 * one block, the loops are: chunks, panels, blocks. So the first block reads a panel's chunk from L2, every other block
 * from L1. Activations (512 tokens x 1024: 512 KiB) and sums (KT_MAX_PANELS: 1 MiB) stay in L2; with remainders they
 * take up to twice as much. Activations bypass L1 (tileloaddt1), where they would evict the chunk: 7.5 ns for a product
 * instead of 10.1 (Sapphire Rapids). Storing sums every 1024 columns costs 2.3 ns for each product, every 512 columns
 * 3.8 ns. With one block each chunk is used once: the loops are panels, chunks, and the sums stay in their tiles until
 * the panel is done. int4 then has chunks of 512 columns, so that the current chunk and the one being unpacked fit into
 * L1 together.
 *
 * Side work, divided among the steps of the multiplication: prefetching the next chunk into L2, in several streams
 * (kt_streams), because one stream does not reach the full speed of the memory; and, for int4, unpacking the next chunk
 * into the unused half of scratch, while the chunk after it is prefetched. With the last chunk of a call, the first
 * chunk of the next call (kt_gemm.next) is prefetched; for int4 also its second chunk, if it belongs to the same panel.
 * An int4 call begins by unpacking its first chunk, and prefetches the second chunk meanwhile if that belongs to
 * another panel.
 *
 * An int4 code is unpacked to 16 * code, in 3 operations for 128 codes; the code itself would take 5. So the unit of
 * the sums is 1, and that of other kernels 16. The sums fit into int32: 65536 columns of 128 * 127. */
#ifndef KT_GEMM_AMX_H
#define KT_GEMM_AMX_H

#include "gemm_tiles_amx.h"

/* A panel's columns first .. first + columns - 1, all in one column block. */
typedef struct {
    int64_t panel, first, columns;
} kt_chunk;

enum {
    KT_MAX_CHUNK = 1024, /* most columns of a chunk */
    KT_MAX_CHUNK_INT4_FEW = 512,
    KT_CHUNK_BYTES = KT_PANEL_ROWS * KT_MAX_CHUNK, /* bytes of an unpacked chunk */
    KT_SUMS_PITCH = KT_PANEL_ROWS * 4,             /* bytes between the sums of two tokens */
    KT_UNPACKED_AT_ONCE = 4, /* lines of 64 packed bytes; the lines of a packed tile are a multiple */
};
_Static_assert(2 * KT_CHUNK_BYTES <= KT_GEMM_SCRATCH, "the current chunk and the next one, unpacked");

/* Up to this number of tokens the VNNI kernel is at least as fast (measured on Sapphire Rapids). */
static inline int64_t kt_vnni_tokens(int bits) {
    return bits == 4 ? 8 : 3;
}

/* Number of streams that prefetch a chunk, each in different pages. One stream reads 9 GB/s, two 10.9; int8, which
 * needs more, reads up to 15.7 GB/s with four; eight are not faster (Sapphire Rapids). */
static inline int64_t kt_streams(int bits) {
    return bits == 4 ? 2 : 4;
}

/* Work besides multiplying; each step does some of it. */
typedef struct {
    const uint8_t *prefetch; /* lines of 64 bytes, in kt_streams() streams of `length` bytes, for L2 */
    int64_t fetched, length, fetch_pace;
    const uint8_t *packed; /* only int4: bytes to unpack */
    uint8_t *codes;        /* their destination */
    int64_t unpacked, bytes, unpack_pace;
} kt_side_work;

/* Whether there is one block, so that the sums of a panel stay in their tiles. */
static inline int kt_is_by_panel(const kt_gemm *job) {
    return job->m <= 2 * job->tile_rows;
}

/* Columns of the chunk that begins at column `first`: the rest of the column block, divided into equal chunks of whole
 * packed tiles. */
static inline int64_t kt_chunk_columns(const kt_gemm *job, int bits, int64_t first) {
    int64_t most = bits == 4 && kt_is_by_panel(job) ? KT_MAX_CHUNK_INT4_FEW : KT_MAX_CHUNK;
    int64_t tile = kt_get_geometry(bits)->tile_columns, remaining = KT_K_BLOCK - first % KT_K_BLOCK;
    if (remaining > job->k - first) remaining = job->k - first;
    int64_t parts = (remaining + most - 1) / most;
    return (remaining + parts * tile - 1) / (parts * tile) * tile;
}

static inline int64_t kt_packed_bytes(int bits, int64_t columns) {
    return columns * KT_PANEL_ROWS * bits / 8;
}

/* The next chunk in the order described above. Returns 0 after the last one. */
static inline int kt_next_chunk(const kt_gemm *job, int bits, kt_chunk *chunk) {
    if (kt_is_by_panel(job)) {
        chunk->first += chunk->columns;
        if (chunk->first == job->k) {
            chunk->first = 0;
            chunk->panel++;
        }
    } else if (++chunk->panel == job->panels) {
        chunk->panel = 0;
        chunk->first += chunk->columns;
    }
    if (chunk->panel == job->panels || chunk->first == job->k) return 0;
    chunk->columns = kt_chunk_columns(job, bits, chunk->first);
    return 1;
}

static inline kt_chunk kt_first_chunk(const kt_gemm *job, int bits) {
    return (kt_chunk){0, 0, kt_chunk_columns(job, bits, 0)};
}

static inline const uint8_t *kt_get_chunk_tiles(const kt_gemm *job, int bits, const kt_chunk *chunk) {
    return kt_chunk_tiles(job, bits, chunk->panel, chunk->first);
}

/* Unpacks 128 codes to 16 * code: 64 columns from the lower nibbles, and the next 64 from the upper ones. */
KT_INLINE KT_TARGET_AMX void kt_unpack_line(const uint8_t *packed, uint8_t *codes) {
    const __m512i upper = _mm512_set1_epi8((char)0xf0);
    __m512i pairs = _mm512_loadu_si512(packed);
    _mm512_store_si512(codes, _mm512_and_si512(_mm512_slli_epi16(pairs, 4), upper));
    _mm512_store_si512(codes + KT_TILE_BYTES, _mm512_and_si512(pairs, upper));
}

/* Unpacks bytes from side_work->unpacked to `end`. */
KT_INLINE KT_TARGET_AMX void kt_unpack(kt_side_work *side_work, int64_t end) {
    for (; side_work->unpacked < end; side_work->unpacked += KT_UNPACKED_AT_ONCE * 64) {
        const uint8_t *from = side_work->packed + side_work->unpacked;
        uint8_t *to = side_work->codes + 2 * side_work->unpacked - side_work->unpacked % KT_TILE_BYTES;
#pragma GCC unroll 4
        for (int i = 0; i < KT_UNPACKED_AT_ONCE; i++) kt_unpack_line(from + i * 64, to + i * 64);
    }
}

KT_INLINE KT_TARGET_AMX void kt_run_side_work(int bits, kt_side_work *side_work) {
    int64_t end = kt_least(side_work->fetched + side_work->fetch_pace, side_work->length);
    for (; side_work->fetched < end; side_work->fetched += 64)
#pragma GCC unroll 4
        for (int64_t q = 0; q < kt_streams(bits); q++)
            _mm_prefetch((const char *)side_work->prefetch + q * side_work->length + side_work->fetched, _MM_HINT_T1);
    if (bits == 4) kt_unpack(side_work, kt_least(side_work->unpacked + side_work->unpack_pace, side_work->bytes));
}

/* Plans to prefetch `bytes` bytes of packed tiles. */
static inline void kt_set_prefetch(int bits, kt_side_work *side_work, const uint8_t *prefetch, int64_t bytes) {
    side_work->prefetch = prefetch;
    side_work->length = bytes / kt_streams(bits);
}

static inline void kt_prefetch_chunk(const kt_gemm *job, int bits, kt_side_work *side_work, const kt_chunk *chunk) {
    kt_set_prefetch(bits, side_work, kt_get_chunk_tiles(job, bits, chunk), kt_packed_bytes(bits, chunk->columns));
}

static inline void kt_unpack_chunk(const kt_gemm *job, kt_side_work *side_work, const kt_chunk *chunk) {
    side_work->packed = kt_get_chunk_tiles(job, 4, chunk);
    side_work->bytes = kt_packed_bytes(4, chunk->columns);
}

/* Plans to prefetch the first chunk of the next call, assuming that it is like this call; or its second chunk
 * (`second`), if it belongs to the same panel. */
static inline void kt_prefetch_next_call(const kt_gemm *job, int bits, kt_side_work *side_work, int second) {
    kt_chunk chunk = kt_first_chunk(job, bits);
    if (!job->next || (second && (!kt_next_chunk(job, bits, &chunk) || chunk.panel))) return;
    int64_t at = kt_packed_bytes(bits, chunk.first);
    int64_t bytes = kt_least(kt_packed_bytes(bits, chunk.columns), job->next_bytes - at);
    if (bytes > 0) kt_set_prefetch(bits, side_work, job->next + at, bytes / 256 * 256);
}

/* Returns the side work while `chunk` is multiplied. int8: prefetch the next chunk. int4: unpack the next chunk to
 * `codes`, and prefetch the chunk after it. */
static inline kt_side_work kt_plan_side_work(const kt_gemm *job, int bits, const kt_chunk *chunk, uint8_t *codes) {
    kt_side_work side_work = {.codes = codes};
    kt_chunk next = *chunk;
    int more = kt_next_chunk(job, bits, &next);
    /* The previous chunk has prefetched the first chunk of the next call, unless this is the only chunk. */
    int second = bits == 4 && !more && (chunk->panel || chunk->first);
    if (bits == 4 && more) {
        kt_unpack_chunk(job, &side_work, &next);
        more = kt_next_chunk(job, bits, &next);
    }
    if (more) kt_prefetch_chunk(job, bits, &side_work, &next);
    else kt_prefetch_next_call(job, bits, &side_work, second);
    return side_work;
}

/* Adds the products of one or two tiles of activations with a chunk's codes to the sums in tiles 4, 5 (and 6, 7).
 * second: where the second tile begins, in bytes after the first. */
KT_INLINE KT_TARGET_AMX void kt_multiply_chunk(int bits, int two, const int8_t *a, int64_t tile_rows, int64_t second,
                                               const uint8_t *codes, int64_t columns, kt_side_work *side_work) {
    for (int64_t j = 0; j < columns; j += 64, codes += KT_TILE_BYTES, a += tile_rows * 64) {
        KT_TILE_LOAD(2, codes, 64);
        KT_TILE_LOAD(3, codes + KT_HALF_BYTES, 64);
        KT_TILE_LOAD_PAST_L1(0, a, 64);
        KT_TILE_MULTIPLY(4, 0, 2);
        KT_TILE_MULTIPLY(5, 0, 3);
        if (two) {
            KT_TILE_LOAD_PAST_L1(1, a + second, 64);
            KT_TILE_MULTIPLY(6, 1, 2);
            KT_TILE_MULTIPLY(7, 1, 3);
        }
        kt_run_side_work(bits, side_work);
    }
}

KT_INLINE KT_TARGET_AMX void kt_begin_block(int two, int from_zero, int64_t tile_rows, const int32_t *c) {
    if (from_zero) {
        kt_zero_sums(two);
        return;
    }
    KT_TILE_LOAD(4, c, KT_SUMS_PITCH);
    KT_TILE_LOAD(5, c + KT_HALF_ROWS, KT_SUMS_PITCH);
    if (two) {
        KT_TILE_LOAD(6, c + tile_rows * KT_PANEL_ROWS, KT_SUMS_PITCH);
        KT_TILE_LOAD(7, c + tile_rows * KT_PANEL_ROWS + KT_HALF_ROWS, KT_SUMS_PITCH);
    }
}

/* Multiplies a chunk with a block of tokens. stay: the sums stay in their tiles between chunks of a panel. */
KT_INLINE KT_TARGET_AMX void kt_run_block(int bits, int two, const kt_gemm *job, int stay, const kt_chunk *chunk,
                                          int64_t token, const uint8_t *codes, kt_side_work *side_work) {
    const int64_t rows = job->tile_rows;
    const int8_t *a = job->a + token * job->k + chunk->first * rows;
    int32_t *c = job->c + chunk->panel * job->c_pitch + token * KT_PANEL_ROWS;
    if (!stay || chunk->first == 0) kt_begin_block(two, chunk->first == 0, rows, c);
    kt_multiply_chunk(bits, two, a, rows, rows * job->k, codes, chunk->columns, side_work);
    if (!stay || chunk->first + chunk->columns == job->k) kt_store_sums(two, c, rows);
}

/* Bytes for each step, such that the side work is done with the last step. */
static inline int64_t kt_pace(int64_t bytes, int64_t unit, int64_t steps) {
    return (bytes / unit + steps - 1) / steps * unit;
}

KT_INLINE KT_TARGET_AMX void kt_run_chunk(int bits, const kt_gemm *job, const kt_chunk *chunk, const uint8_t *codes,
                                          kt_side_work *side_work) {
    const int stay = kt_is_by_panel(job);
    const int64_t block = 2 * job->tile_rows, steps = (job->m + block - 1) / block * (chunk->columns / 64);
    side_work->fetch_pace = kt_pace(side_work->length, 64, steps);
    side_work->unpack_pace = kt_pace(side_work->bytes, KT_UNPACKED_AT_ONCE * 64, steps);
    for (int64_t t = 0; t < job->m; t += block) {
        if (job->m - t > job->tile_rows) kt_run_block(bits, 1, job, stay, chunk, t, codes, side_work);
        else kt_run_block(bits, 0, job, stay, chunk, t, codes, side_work);
    }
}

/* Unpacks the first chunk of an int4 call, and prefetches the second one if the previous call has not. */
KT_INLINE KT_TARGET_AMX void kt_begin_call(const kt_gemm *job) {
    kt_chunk chunk = kt_first_chunk(job, 4);
    kt_side_work side_work = {.codes = job->scratch};
    kt_unpack_chunk(job, &side_work, &chunk);
    if (kt_next_chunk(job, 4, &chunk) && chunk.panel) kt_prefetch_chunk(job, 4, &side_work, &chunk);
    side_work.fetch_pace = side_work.length;
    side_work.unpack_pace = side_work.bytes;
    kt_run_side_work(4, &side_work);
}

/* job->m > 0, job->panels > 0. Returns the unit of the sums. */
KT_INLINE KT_TARGET_AMX int kt_gemm_tiles(int bits, const kt_gemm *job) {
    int half = 0;
    kt_chunk chunk = kt_first_chunk(job, bits);
    kt_configure_tiles(job->tile_rows);
    if (bits == 4) kt_begin_call(job);
    do {
        const uint8_t *codes = bits == 4 ? job->scratch + half * KT_CHUNK_BYTES : kt_get_chunk_tiles(job, bits, &chunk);
        half ^= 1;
        kt_side_work side_work = kt_plan_side_work(job, bits, &chunk, job->scratch + half * KT_CHUNK_BYTES);
        kt_run_chunk(bits, job, &chunk, codes, &side_work);
    } while (kt_next_chunk(job, bits, &chunk));
    KT_TILES_RELEASE();
    return 1;
}

#endif
