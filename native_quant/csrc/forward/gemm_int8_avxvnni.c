/* Dot products with AMXINT8 weights: code + 128 (a flipped sign bit) is unsigned. */
enum { TWO_STREAMS = 1 }; /* 7 to 12 tokens take 1 to 6 % less than with one (Emerald Rapids) */

#include "gemm_avxvnni.h"

KT_INLINE KT_TARGET_AVXVNNI void tile_few(int tokens, const uint8_t *tile, const int8_t *a, int32_t *c) {
    const int vectors = tokens <= 2 ? 4 : 2; /* of 8 rows, at a time */
#pragma GCC unroll 1
    for (int first = 0; first < 4; first += vectors) {
        const uint8_t *codes = kt_base(tile + first * (KT_HALF_BYTES / 2));
        __m256i sum[KT_FEW][4];
#pragma GCC unroll 6
        for (int t = 0; t < tokens; t++)
            for (int v = 0; v < vectors; v++) sum[t][v] = kt_load(c + t * KT_STRIP_ROWS + (first + v) * 8);
#pragma GCC unroll 1
        for (int part = 0; part < 4; part++, codes += 256)
#pragma GCC unroll 4
            for (int q = 0; q < 4; q++) {
                __m256i code[4];
                for (int v = 0; v < vectors; v++) {
                    const uint8_t *place = codes + v / 2 * KT_HALF_BYTES + q * 64 + v % 2 * 32;
                    if (v % 2 == 0) _mm_prefetch((const char *)place + KT_FETCH_AHEAD, _MM_HINT_T0);
                    code[v] = _mm256_xor_si256(kt_load(place), _mm256_set1_epi8(-128));
                }
#pragma GCC unroll 6
                for (int t = 0; t < tokens; t++) {
                    __m256i four = kt_four(a + t * KT_K_BLOCK + 16 * part + 4 * q);
                    for (int v = 0; v < vectors; v++) sum[t][v] = KT_DPBUSD256(sum[t][v], code[v], four);
                }
            }
#pragma GCC unroll 6
        for (int t = 0; t < tokens; t++)
            for (int v = 0; v < vectors; v++) kt_store(c + t * KT_STRIP_ROWS + (first + v) * 8, sum[t][v]);
    }
}

KT_TARGET_AVXVNNI static void unpack(const uint8_t *tiles, int64_t columns, uint8_t *codes) {
    for (int64_t i = 0; i < columns * KT_STRIP_ROWS; i += 32)
        kt_store(codes + i, _mm256_xor_si256(kt_load(tiles + i), _mm256_set1_epi8(-128)));
}

KT_DEFINE_ALL(KT_TARGET_AVXVNNI, 64)
static const kt_gemm_steps steps = {8, 128, 512, KT_ALL(few), unpack, kt_copy_bytes, KT_ALL(block)};

int kt_gemm_int8_avxvnni(const kt_gemm *job) {
    return kt_gemm_in_steps(job, &steps);
}
