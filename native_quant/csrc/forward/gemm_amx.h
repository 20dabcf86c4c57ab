/* Dot products with AMX tiles: the code shared by both weight formats.
 *
 * A tile of activations is up to 16 tokens x 64 columns, 64 bytes after 64 bytes (kt_tiling); a tile of weights is half
 * a packed tile (16 rows x 64 columns as quads), read in place (int8) or unpacked to scratch, once for all tokens
 * (int4); a tile of sums is 16 x 16 int32. A block is two tiles of activations times the two halves of a panel: 4
 * products for 4 loads. With 8 tiles no shape loads less: 1 x 4 loads 5 for 4, 2 x 3 loads 7 for 6. The last block may
 * have one tile: 2 products for 3 loads. Few tokens are left to the AVX-512 VNNI kernel: there memory is the limit.
 *
 * Order. The columns are cut into chunks of at most 1024 (a panel's: 32 KiB of int8, in L1 48 KiB). With more than
 * one block: for each chunk, for each panel, for each block. So a panel's chunk comes from L2 once and from L1 for
 * every other block; activations (512 tokens x 1024: 512 KiB) and sums (KT_MAX_PANELS: 1 MiB) stay in L2; with
 * remainders, up to twice as much. Activations bypass L1 (tileloaddt1), where they would push the chunk out: 7.5 ns
 * a product instead of 10.1 (Sapphire Rapids, 7.6 at best). Sums that leave their tiles every 1024 columns cost 2.3
 * ns a product, every 512 3.8. With one block a chunk is used once, so it is panel by panel, and the sums stay in
 * their tiles until the panel is done; int4 then has chunks of 512 columns, for the chunk at hand and the one that
 * is being unpacked stay in L1 together.
 *
 * Errands, spread over the steps, done while products are under way: memory to L2 for the chunk to come, in several
 * streams (kt_streams), since one does not use all of the memory's speed; and for int4 the unpacking of the next
 * chunk into the half of scratch that is not in use, while the one after it is fetched. After the last chunk of a
 * call comes what the next one (kt_gemm.next) begins with: its first chunk, and for int4 the second one, too, if it
 * belongs to the same panel. An int4 call begins with unpacking its first chunk, and fetches a second one of another
 * panel meanwhile.
 *
 * An int4 code is unpacked to 16 * code, in 3 operations for 128 codes, where the code itself takes 5; so the sums'
 * unit is 1 where other kernels leave 16. int32 holds them: 65536 columns of 128 * 127. */
#ifndef KT_GEMM_AMX_H
#define KT_GEMM_AMX_H

#include "gemm_tiles_amx.h"

/* A panel's columns first .. first + columns - 1, all in one column block. */
typedef struct {
    int64_t panel, first, columns;
} kt_chunk;

enum {
    KT_CHUNK_MOST = 1024, /* columns */
    KT_CHUNK_MOST_INT4_FEW = 512,
    KT_CHUNK_BYTES = KT_PANEL_ROWS * KT_CHUNK_MOST, /* of an unpacked one */
    KT_SUMS_PITCH = KT_PANEL_ROWS * 4,              /* bytes from token to token */
    KT_UNPACKED_AT_ONCE = 4,                        /* lines of 64 packed bytes; a packed tile has a multiple of it */
};
_Static_assert(2 * KT_CHUNK_BYTES <= KT_GEMM_SCRATCH, "the chunk at hand and the next one, unpacked");

/* By bits: up to how many tokens the VNNI kernel is at least as fast (measured on Sapphire Rapids). */
static inline int64_t kt_left_to_vnni(int bits) {
    return bits == 4 ? 8 : 3;
}

/* By bits: streams from memory in which a chunk is fetched. One gives 9 GB/s, two 10.9; int8, which needs more, gets up
 * to 15.7 with four; eight are no better (Sapphire Rapids). Each reads pages of its own. */
static inline int64_t kt_streams(int bits) {
    return bits == 4 ? 2 : 4;
}

/* What is done besides multiplying, some of it with each step. */
typedef struct {
    const uint8_t *ahead; /* to L2: lines of 64 bytes in kt_streams() streams of `length` bytes */
    int64_t fetched, length, fetch_pace;
    const uint8_t *packed; /* int4 only: unpacked .. */
    uint8_t *codes;        /* .. to here */
    int64_t unpacked, bytes, unpack_pace;
} kt_errand;

/* One block: the sums of a panel stay in their tiles. */
static inline int kt_is_by_panel(const kt_gemm *job) {
    return job->m <= 2 * job->tile_rows;
}

/* The chunk that begins at column `first`: the rest of the column block in equal parts of whole packed tiles. */
static inline int64_t kt_chunk_columns(const kt_gemm *job, int bits, int64_t first) {
    int64_t most = bits == 4 && kt_is_by_panel(job) ? KT_CHUNK_MOST_INT4_FEW : KT_CHUNK_MOST;
    int64_t tile = kt_geometry_of(bits)->tile_columns, left = KT_K_BLOCK - first % KT_K_BLOCK;
    if (left > job->k - first) left = job->k - first;
    int64_t parts = (left + most - 1) / most;
    return (left + parts * tile - 1) / (parts * tile) * tile;
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

static inline const uint8_t *kt_tiles_of_chunk(const kt_gemm *job, int bits, const kt_chunk *chunk) {
    return kt_chunk_tiles(job, bits, chunk->panel, chunk->first);
}

/* 16 * 128 codes: 64 columns of the low nibbles, and the next 64 of the high ones. */
KT_INLINE KT_TARGET_AMX void kt_unpack_line(const uint8_t *packed, uint8_t *codes) {
    const __m512i upper = _mm512_set1_epi8((char)0xf0);
    __m512i pairs = _mm512_loadu_si512(packed);
    _mm512_store_si512(codes, _mm512_and_si512(_mm512_slli_epi16(pairs, 4), upper));
    _mm512_store_si512(codes + KT_TILE_BYTES, _mm512_and_si512(pairs, upper));
}

/* Packed bytes from errand->unpacked to `end`. */
KT_INLINE KT_TARGET_AMX void kt_unpack(kt_errand *errand, int64_t end) {
    for (; errand->unpacked < end; errand->unpacked += KT_UNPACKED_AT_ONCE * 64) {
        const uint8_t *from = errand->packed + errand->unpacked;
        uint8_t *to = errand->codes + 2 * errand->unpacked - errand->unpacked % KT_TILE_BYTES;
#pragma GCC unroll 4
        for (int i = 0; i < KT_UNPACKED_AT_ONCE; i++) kt_unpack_line(from + i * 64, to + i * 64);
    }
}

KT_INLINE KT_TARGET_AMX void kt_run_errand(int bits, kt_errand *errand) {
    int64_t end = kt_least(errand->fetched + errand->fetch_pace, errand->length);
    for (; errand->fetched < end; errand->fetched += 64)
#pragma GCC unroll 4
        for (int64_t q = 0; q < kt_streams(bits); q++)
            _mm_prefetch((const char *)errand->ahead + q * errand->length + errand->fetched, _MM_HINT_T1);
    if (bits == 4) kt_unpack(errand, kt_least(errand->unpacked + errand->unpack_pace, errand->bytes));
}

/* Fetches `bytes` from `ahead` on, packed tiles. */
static inline void kt_fetch_meanwhile(int bits, kt_errand *errand, const uint8_t *ahead, int64_t bytes) {
    errand->ahead = ahead;
    errand->length = bytes / kt_streams(bits);
}

static inline void kt_fetch_chunk(const kt_gemm *job, int bits, kt_errand *errand, const kt_chunk *chunk) {
    kt_fetch_meanwhile(bits, errand, kt_tiles_of_chunk(job, bits, chunk), kt_packed_bytes(bits, chunk->columns));
}

static inline void kt_unpack_chunk(const kt_gemm *job, kt_errand *errand, const kt_chunk *chunk) {
    errand->packed = kt_tiles_of_chunk(job, 4, chunk);
    errand->bytes = kt_packed_bytes(4, chunk->columns);
}

/* Fetches the first chunk of the next call, which is taken to be like this one; or the second, if it is of the same
 * panel. */
static inline void kt_fetch_next_call(const kt_gemm *job, int bits, kt_errand *errand, int second) {
    kt_chunk chunk = kt_first_chunk(job, bits);
    if (!job->next || (second && (!kt_next_chunk(job, bits, &chunk) || chunk.panel))) return;
    int64_t at = kt_packed_bytes(bits, chunk.first);
    int64_t bytes = kt_least(kt_packed_bytes(bits, chunk.columns), job->next_bytes - at);
    if (bytes > 0) kt_fetch_meanwhile(bits, errand, job->next + at, bytes / 256 * 256);
}

/* The errand while `chunk` is multiplied. int8: the next one to L2; int4: that is unpacked, to `codes`, and the one
 * after it goes to L2. */
static inline kt_errand kt_errand_for(const kt_gemm *job, int bits, const kt_chunk *chunk, uint8_t *codes) {
    kt_errand errand = {.codes = codes};
    kt_chunk next = *chunk;
    int more = kt_next_chunk(job, bits, &next);
    /* The first chunk of the next call came while this one was unpacked, unless this is the only one. */
    int second = bits == 4 && !more && (chunk->panel || chunk->first);
    if (bits == 4 && more) {
        kt_unpack_chunk(job, &errand, &next);
        more = kt_next_chunk(job, bits, &next);
    }
    if (more) kt_fetch_chunk(job, bits, &errand, &next);
    else kt_fetch_next_call(job, bits, &errand, second);
    return errand;
}

/* Adds the products of one or two tiles of activations with a chunk's codes to the sums in tiles 4, 5 (and 6, 7).
 * second: where the second tile begins, in bytes after the first. */
KT_INLINE KT_TARGET_AMX void kt_multiply_chunk(int bits, int two, const int8_t *a, int64_t tile_rows, int64_t second,
                                               const uint8_t *codes, int64_t columns, kt_errand *errand) {
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
        kt_run_errand(bits, errand);
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

/* One chunk with one block of tokens. stay: the sums are left in their tiles from chunk to chunk of a panel. */
KT_INLINE KT_TARGET_AMX void kt_work_block(int bits, int two, const kt_gemm *job, int stay, const kt_chunk *chunk,
                                           int64_t token, const uint8_t *codes, kt_errand *errand) {
    const int64_t rows = job->tile_rows;
    const int8_t *a = job->a + token * job->k + chunk->first * rows;
    int32_t *c = job->c + chunk->panel * job->c_pitch + token * KT_PANEL_ROWS;
    if (!stay || chunk->first == 0) kt_begin_block(two, chunk->first == 0, rows, c);
    kt_multiply_chunk(bits, two, a, rows, rows * job->k, codes, chunk->columns, errand);
    if (!stay || chunk->first + chunk->columns == job->k) kt_store_sums(two, c, rows);
}

/* So much of an errand with each of the steps that it is done with the last one. */
static inline int64_t kt_pace(int64_t bytes, int64_t unit, int64_t steps) {
    return (bytes / unit + steps - 1) / steps * unit;
}

KT_INLINE KT_TARGET_AMX void kt_work_chunk(int bits, const kt_gemm *job, const kt_chunk *chunk, const uint8_t *codes,
                                           kt_errand *errand) {
    const int stay = kt_is_by_panel(job);
    const int64_t block = 2 * job->tile_rows, steps = (job->m + block - 1) / block * (chunk->columns / 64);
    errand->fetch_pace = kt_pace(errand->length, 64, steps);
    errand->unpack_pace = kt_pace(errand->bytes, KT_UNPACKED_AT_ONCE * 64, steps);
    for (int64_t t = 0; t < job->m; t += block) {
        if (job->m - t > job->tile_rows) kt_work_block(bits, 1, job, stay, chunk, t, codes, errand);
        else kt_work_block(bits, 0, job, stay, chunk, t, codes, errand);
    }
}

/* Unpacks the first chunk of an int4 call, and fetches the second one where the call before has not. */
KT_INLINE KT_TARGET_AMX void kt_begin_call(const kt_gemm *job) {
    kt_chunk chunk = kt_first_chunk(job, 4);
    kt_errand errand = {.codes = job->scratch};
    kt_unpack_chunk(job, &errand, &chunk);
    if (kt_next_chunk(job, 4, &chunk) && chunk.panel) kt_fetch_chunk(job, 4, &errand, &chunk);
    errand.fetch_pace = errand.length;
    errand.unpack_pace = errand.bytes;
    kt_run_errand(4, &errand);
}

/* job->m > 0, job->panels > 0. Returns the unit of the sums. */
KT_INLINE KT_TARGET_AMX int kt_gemm_tiles(int bits, const kt_gemm *job) {
    int half = 0;
    kt_chunk chunk = kt_first_chunk(job, bits);
    kt_configure_tiles(job->tile_rows);
    if (bits == 4) kt_begin_call(job);
    do {
        const uint8_t *codes = bits == 4 ? job->scratch + half * KT_CHUNK_BYTES : kt_tiles_of_chunk(job, bits, &chunk);
        half ^= 1;
        kt_errand errand = kt_errand_for(job, bits, &chunk, job->scratch + half * KT_CHUNK_BYTES);
        kt_work_chunk(bits, job, &chunk, codes, &errand);
    } while (kt_next_chunk(job, bits, &chunk));
    KT_TILES_RELEASE();
    return 1;
}

#endif
