/* Dot products with AMX tiles: the code shared by both weight formats.
 *
 * A tile of activations is 16 tokens x 64 columns where they lie; a tile of weights is half a packed tile (16 rows x 64
 * columns as quads), read in place (int8) or unpacked to scratch, once for all tokens (int4); a tile of sums is 16 x 16
 * int32. By tokens:
 *
 * - up to KT_LEFT_TO_VNNI: the AVX-512 VNNI kernel, which reads at 85 to 100 % of the memory's speed there (measured on
 * Cascade Lake). Memory is the limit, and 16-row tiles would be half empty.
 * - up to 16: one tile of activations with as many rows as there are tokens, times both halves of the strip. 2 products
 * for 3 loads, and only two chains of sums; about 30 cycles a KiB of weights, where memory gives one in 200.
 * - more: 2 x 2 tiles, 4 products for 4 loads: 64 cycles of products hide 32 of loads if those hit L1. With 8 tiles no
 * shape loads less: 1 x 4 loads 5 for 4, 2 x 3 loads 7 for 6. A last block of up to 16 tokens is done as above, with 16
 * rows.
 *
 * Order. The columns are cut into panels of 512 (a strip's: 16 KiB of int8, in L1 48 KiB). With more than 32 tokens:
 * for each 512 columns, for each strip, for each 32 tokens. So the panel comes from L2 once and from L1 for every other
 * block; activations (256 tokens x 512: 128 KiB) and sums (KT_MAX_STRIPS: 512 KiB) stay in L2. Per block of 8 steps,
 * 512 cycles of products, L2 gives 16 KiB of activations and 4 KiB of sums, and takes those back; it would be 32 KiB if
 * panels were longer than L1 holds, and that was measured (Sapphire Rapids, registers 6.7 TOP/s): both operands from
 * L2 3.4 to 3.8, one of them from L1 4.9 to 5.4. With at most 32 tokens a panel is used once, so it is strip by strip
 * and the sums stay in their tiles until the strip is done.
 *
 * Errands, spread over the steps, in the shade of the products: memory to L2 for the panel to come; for int4 also its
 * unpacking, into the half of scratch that is not in use: with one block of tokens 80 operations and 32 stores a step,
 * against 64 cycles of products. It makes sign-extended codes, 5 operations for 128; 16 * code takes 3, and a pass over
 * all sums in the end. */
#ifndef KT_GEMM_AMX_H
#define KT_GEMM_AMX_H

#include "gemm_tiles_amx.h"

/* A strip's columns first .. first + columns - 1, all in one column block. */
typedef struct {
    int64_t strip, first, columns;
} kt_panel;

enum {
    KT_LEFT_TO_VNNI = 8, /* tokens */
    /* what is left of a column block is not cut in two if it is this short: 768 columns */
    KT_LAST_CHUNK = KT_CHUNK * 3 / 2,
    KT_PANEL_BYTES = KT_STRIP_ROWS * KT_LAST_CHUNK,
    KT_LINES = 4, /* of an errand that are done at a time; a panel and a tile have multiples of it */
    KT_SUMS_PITCH = KT_STRIP_ROWS * 4, /* bytes from token to token */
};

/* What is done besides multiplying: lines at .. lines - 1 (64 packed bytes each), `pace` of them a step. */
typedef struct {
    int64_t at, lines, pace;
    const uint8_t *ahead;  /* to L2 */
    const uint8_t *packed; /* int4 only: unpacked .. */
    uint8_t *codes;        /* .. to here */
} kt_errand;

static inline int64_t kt_panel_columns(const kt_gemm *job, int64_t first) {
    int64_t left = KT_K_BLOCK - first % KT_K_BLOCK;
    if (left > job->k - first) left = job->k - first;
    return left <= KT_LAST_CHUNK ? left : KT_CHUNK;
}

/* The next panel in the order described above. Returns 0 after the last one. */
static inline int kt_next_panel(const kt_gemm *job, int by_strip, kt_panel *panel) {
    if (by_strip) {
        panel->first += panel->columns;
        if (panel->first == job->k) {
            panel->first = 0;
            panel->strip++;
        }
    } else if (++panel->strip == job->strips) {
        panel->strip = 0;
        panel->first += panel->columns;
    }
    if (panel->strip == job->strips || panel->first == job->k) return 0;
    panel->columns = kt_panel_columns(job, panel->first);
    return 1;
}

static inline const uint8_t *kt_panel_tiles(const kt_gemm *job, int bits, const kt_panel *panel) {
    return kt_chunk_tiles(job, bits, panel->strip, panel->first);
}

/* 128 codes, -8..7: 64 columns of the low nibbles, and the next 64 of the high ones. */
KT_INLINE KT_TARGET_AMX void kt_unpack_line(const uint8_t *packed, uint8_t *codes) {
    const __m512i nibble = _mm512_set1_epi8(15), eight = _mm512_set1_epi8(8);
    __m512i low = _mm512_loadu_si512(packed), high = _mm512_srli_epi16(low, 4);
    low = _mm512_ternarylogic_epi32(low, nibble, eight, 0x6a); /* (x & 15) ^ 8 = code + 8 */
    high = _mm512_ternarylogic_epi32(high, nibble, eight, 0x6a);
    _mm512_store_si512(codes, _mm512_sub_epi8(low, eight));
    _mm512_store_si512(codes + KT_TILE_BYTES, _mm512_sub_epi8(high, eight));
}

KT_INLINE KT_TARGET_AMX void kt_run_errand(int bits, kt_errand *errand, int64_t lines) {
    int64_t end = errand->at + lines < errand->lines ? errand->at + lines : errand->lines;
    for (; errand->at < end; errand->at += KT_LINES) {
        int64_t offset = errand->at * 64, in_tile = offset % KT_TILE_BYTES;
#pragma GCC unroll 4
        for (int i = 0; i < KT_LINES; i++) {
            _mm_prefetch((const char *)errand->ahead + offset + i * 64, _MM_HINT_T1);
            if (bits == 4)
                kt_unpack_line(errand->packed + offset + i * 64, errand->codes + 2 * offset - in_tile + i * 64);
        }
    }
}

/* The errand for `panel`, which is multiplied next: int8: to L2; int4: unpacked, and the one after it to L2. */
static inline kt_errand kt_errand_for(const kt_gemm *job, int bits, int by_strip, const kt_panel *panel,
                                      uint8_t *codes) {
    const uint8_t *tiles = kt_panel_tiles(job, bits, panel), *ahead = tiles;
    kt_panel after = *panel;
    if (bits == 4 && kt_next_panel(job, by_strip, &after)) ahead = kt_panel_tiles(job, bits, &after);
    return (kt_errand){
        .lines = KT_STRIP_ROWS * panel->columns * bits / 8 / 64, .ahead = ahead, .packed = tiles, .codes = codes};
}

/* Adds the products of up to 16 (two = 0) or 32 tokens with a panel's codes to the sums in tiles 4, 5 (and 6, 7). */
KT_INLINE KT_TARGET_AMX void kt_multiply_panel(int bits, int two, const int8_t *a, int64_t a_pitch,
                                               const uint8_t *codes, int64_t columns, kt_errand *errand) {
    const int8_t *a1 = a + 16 * a_pitch;
    for (int64_t j = 0; j < columns; j += 64, codes += KT_TILE_BYTES) {
        KT_TILE_LOAD(0, a + j, a_pitch);
        KT_TILE_LOAD(2, codes, 64);
        KT_TILE_MULTIPLY(4, 0, 2);
        KT_TILE_LOAD(3, codes + KT_HALF_BYTES, 64);
        KT_TILE_MULTIPLY(5, 0, 3);
        if (two) {
            KT_TILE_LOAD(1, a1 + j, a_pitch);
            KT_TILE_MULTIPLY(6, 1, 2);
            KT_TILE_MULTIPLY(7, 1, 3);
        }
        kt_run_errand(bits, errand, errand->pace);
    }
}

KT_INLINE KT_TARGET_AMX void kt_begin_block(int two, int from_zero, const int32_t *c) {
    if (from_zero) {
        kt_zero_sums(two);
        return;
    }
    KT_TILE_LOAD(4, c, KT_SUMS_PITCH);
    KT_TILE_LOAD(5, c + 16, KT_SUMS_PITCH);
    if (two) {
        KT_TILE_LOAD(6, c + 16 * KT_STRIP_ROWS, KT_SUMS_PITCH);
        KT_TILE_LOAD(7, c + 16 * KT_STRIP_ROWS + 16, KT_SUMS_PITCH);
    }
}

/* One panel with all tokens. stay: the sums are left in their tiles from panel to panel of a strip (there is one
 * block). */
KT_INLINE KT_TARGET_AMX void kt_work_panel(int bits, const kt_gemm *job, int stay, const kt_panel *panel,
                                           const uint8_t *codes, kt_errand *errand) {
    int64_t steps = (job->m + 31) / 32 * (panel->columns / 64);
    errand->pace = (errand->lines + steps - 1) / steps;
    for (int64_t t = 0; t < job->m; t += 32) {
        const int8_t *a = job->a + t * job->a_pitch + panel->first;
        int32_t *c = job->c + panel->strip * job->c_pitch + t * KT_STRIP_ROWS;
        int begin = !stay || panel->first == 0, end = !stay || panel->first + panel->columns == job->k;
        if (job->m - t > 16) {
            if (begin) kt_begin_block(1, panel->first == 0, c);
            kt_multiply_panel(bits, 1, a, job->a_pitch, codes, panel->columns, errand);
            if (end) kt_store_sums(1, c, KT_TILE_TOKENS);
        } else {
            if (begin) kt_begin_block(0, panel->first == 0, c);
            kt_multiply_panel(bits, 0, a, job->a_pitch, codes, panel->columns, errand);
            if (end) kt_store_sums(0, c, 0);
        }
    }
}

/* job->m > 0, job->strips > 0. */
KT_INLINE KT_TARGET_AMX void kt_gemm_tiles(int bits, const kt_gemm *job) {
    int by_strip = job->m <= 32, half = 0, more = 1;
    kt_panel panel = {0, 0, kt_panel_columns(job, 0)};
    kt_configure_tiles(job->m);
    if (bits == 4) {
        kt_errand first = kt_errand_for(job, bits, by_strip, &panel, job->scratch);
        kt_run_errand(bits, &first, first.lines);
    }
    while (more) {
        kt_panel next = panel;
        kt_errand errand = {0};
        const uint8_t *codes = bits == 4 ? job->scratch + half * KT_PANEL_BYTES : kt_panel_tiles(job, bits, &panel);
        half ^= 1;
        more = kt_next_panel(job, by_strip, &next);
        if (more) errand = kt_errand_for(job, bits, by_strip, &next, job->scratch + half * KT_PANEL_BYTES);
        kt_work_panel(bits, job, by_strip, &panel, codes, &errand);
        panel = next;
    }
    KT_TILES_RELEASE();
}

#endif
