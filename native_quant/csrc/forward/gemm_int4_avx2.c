/* Dot products with AMXINT4 weights by vpmaddubsw: code + 8 (a flipped sign bit) is unsigned, 0..15. A sum of two
 * products is at most 2 * 15 * 127 = 3810: eight of them fit int16 and are widened together. */
#include "gemm_avx2.h"

enum { AHEAD = 2560, PARTS = 2 };

/* c += the two halves of each 32 bits. */
KT_INLINE KT_TARGET_AVX2 void add_to(int32_t *c, __m256i int16) {
    kt_store(c, _mm256_add_epi32(_mm256_madd_epi16(int16, _mm256_set1_epi16(1)), kt_load(c)));
}

KT_INLINE KT_TARGET_AVX2 void part_few(int tokens, const uint8_t *half, const int8_t *a, int32_t *c) {
    half = kt_base(half);
#pragma GCC unroll 1
    for (int first = 0; first < 16; first += 4) {
        __m256i sum[KT_FEW][2];
#pragma GCC unroll 6
        for (int t = 0; t < tokens; t++) sum[t][0] = sum[t][1] = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int q = first; q < first + 4; q++) {
            const uint8_t *place = half + q * 64;
            _mm_prefetch((const char *)place + AHEAD, _MM_HINT_T0);
            __m256i pair[2] = {kt_unsigned_pair(place), kt_unsigned_pair(place + 32)};
            for (int n = 0; n < 2; n++) {
                __m256i first_codes = n ? kt_high(pair[0]) : kt_low(pair[0]);
                __m256i second_codes = n ? kt_high(pair[1]) : kt_low(pair[1]);
#pragma GCC unroll 6
                for (int t = 0; t < tokens; t++) {
                    __m256i four = kt_four(a + t * KT_K_BLOCK + n * 64 + 4 * q);
                    sum[t][0] = kt_add16(sum[t][0], _mm256_maddubs_epi16(first_codes, four));
                    sum[t][1] = kt_add16(sum[t][1], _mm256_maddubs_epi16(second_codes, four));
                }
            }
        }
#pragma GCC unroll 6
        for (int t = 0; t < tokens; t++)
            for (int v = 0; v < 2; v++) add_to(c + t * KT_PANEL_ROWS + v * 8, sum[t][v]);
    }
}

KT_INLINE KT_TARGET_AVX2 void block(int tokens, const uint8_t *codes, int64_t columns, const int8_t *a, int32_t *c,
                                    const uint8_t *prefetch, int64_t step) {
    for (int h = 0; h < 2; h++, c += KT_HALF_ROWS) {
        const uint8_t *at = codes + h * KT_HALF_BYTES;
        for (int64_t j = 0; j < columns; j += 32, at += j % 64 ? 512 : KT_TILE_BYTES - 512) {
            __m256i sum[KT_FEW][2];
#pragma GCC unroll 6
            for (int t = 0; t < tokens; t++) sum[t][0] = sum[t][1] = _mm256_setzero_si256();
#pragma GCC unroll 8
            for (int q = 0; q < 8; q++) {
                __m256i first = kt_load(at + q * 64), second = kt_load(at + q * 64 + 32);
                kt_fetch_next(q, &prefetch, step);
#pragma GCC unroll 6
                for (int t = 0; t < tokens; t++) {
                    __m256i four = kt_four(a + t * KT_CHUNK_PITCH + j + 4 * q);
                    sum[t][0] = kt_add16(sum[t][0], _mm256_maddubs_epi16(first, four));
                    sum[t][1] = kt_add16(sum[t][1], _mm256_maddubs_epi16(second, four));
                }
            }
#pragma GCC unroll 6
            for (int t = 0; t < tokens; t++)
                for (int v = 0; v < 2; v++) add_to(c + t * KT_PANEL_ROWS + v * 8, sum[t][v]);
        }
    }
}

KT_DEFINE_ALL(KT_TARGET_AVX2, 128)
static const kt_gemm_steps steps = {4, 8, 512, KT_ALL(few), kt_unpack_int4, kt_copy_bytes, KT_ALL(block)};

int kt_gemm_int4_avx2(const kt_gemm *job) {
    return kt_gemm_in_steps(job, &steps);
}
