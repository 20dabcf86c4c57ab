/* Dot products with AMXINT8 weights.
 *
 * Few tokens: vpmaddubsw of |code| with the activation that got the code's sign; 2 * 128 * 127 fits int16.
 * Many: codes and activations as int16 and vpmaddwd, columns 0 and 2 of a quad in one register and 1 and 3 in another,
 * which is how shifts unpack them. */
#include "gemm_avx2.h"

enum { AHEAD = 2560, PARTS = 2 };

KT_INLINE KT_TARGET_AVX2 void part_few(int tokens, const uint8_t *half, const int8_t *a, int32_t *c) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum[KT_FEW][2];
    half = kt_base(half);
#pragma GCC unroll 6
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < 2; v++) sum[t][v] = kt_load(c + t * KT_PANEL_ROWS + v * 8);
#pragma GCC unroll 1
    for (int first = 0; first < 16; first += 4)
#pragma GCC unroll 4
        for (int q = first; q < first + 4; q++) {
            _mm_prefetch((const char *)half + q * 64 + AHEAD, _MM_HINT_T0);
            for (int v = 0; v < 2; v++) {
                __m256i code = kt_load(half + q * 64 + v * 32), magnitude = _mm256_abs_epi8(code);
#pragma GCC unroll 6
                for (int t = 0; t < tokens; t++) {
                    __m256i four = _mm256_sign_epi8(kt_four(a + t * KT_K_BLOCK + 4 * q), code);
                    __m256i products = _mm256_maddubs_epi16(magnitude, four);
                    sum[t][v] = kt_add32(sum[t][v], _mm256_madd_epi16(products, ones));
                }
            }
        }
#pragma GCC unroll 6
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < 2; v++) kt_store(c + t * KT_PANEL_ROWS + v * 8, sum[t][v]);
}

/* Bytes 0 and 2, or 1 and 3, of each 4 as int16. */
KT_INLINE KT_TARGET_AVX2 __m256i even_bytes(__m256i x) {
    return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8);
}

KT_INLINE KT_TARGET_AVX2 __m256i odd_bytes(__m256i x) {
    return _mm256_srai_epi16(x, 8);
}

/* A quad of 16 rows, 64 bytes, becomes 64 bytes of its even columns and 64 of its odd ones. */
KT_TARGET_AVX2 static void unpack(const uint8_t *tiles, int64_t columns, uint8_t *codes) {
    for (int64_t i = 0; i < columns * KT_PANEL_ROWS; i += 64, codes += 128)
        for (int v = 0; v < 2; v++) {
            __m256i code = kt_load(tiles + i + v * 32);
            kt_store(codes + v * 32, even_bytes(code));
            kt_store(codes + v * 32 + 64, odd_bytes(code));
        }
}

/* 8 quads, 32 bytes, become 32 bytes of their even columns and 32 of their odd ones. */
KT_TARGET_AVX2 static void copy(const int8_t *a, int64_t columns, int8_t *out) {
    for (int64_t j = 0; j < columns; j += 32, out += 64) {
        __m256i quads = kt_load(a + j);
        kt_store(out, even_bytes(quads));
        kt_store(out + 32, odd_bytes(quads));
    }
}

KT_INLINE KT_TARGET_AVX2 void block(int tokens, const uint8_t *codes, int64_t columns, const int8_t *a, int32_t *c,
                                    const uint8_t *prefetch, int64_t step) {
    for (int h = 0; h < 2; h++, c += KT_HALF_ROWS) {
        __m256i sum[KT_FEW][2];
#pragma GCC unroll 6
        for (int t = 0; t < tokens; t++)
            for (int v = 0; v < 2; v++) sum[t][v] = kt_load(c + t * KT_PANEL_ROWS + v * 8);
        const uint8_t *at = codes + h * 2 * KT_HALF_BYTES;
        for (int64_t j = 0; j < columns; j += 32, at += j % 64 ? 1024 : 2 * KT_TILE_BYTES - 1024) {
#pragma GCC unroll 8
            for (int q = 0; q < 8; q++) {
                kt_fetch_next(q, &prefetch, step);
                for (int odd = 0; odd < 2; odd++) {
                    __m256i first = kt_load(at + q * 128 + odd * 64), second = kt_load(at + q * 128 + odd * 64 + 32);
#pragma GCC unroll 6
                    for (int t = 0; t < tokens; t++) {
                        __m256i two = kt_four(a + t * KT_CHUNK_PITCH + 2 * j + odd * 32 + 4 * q);
                        sum[t][0] = kt_add32(sum[t][0], _mm256_madd_epi16(first, two));
                        sum[t][1] = kt_add32(sum[t][1], _mm256_madd_epi16(second, two));
                    }
                }
            }
        }
#pragma GCC unroll 6
        for (int t = 0; t < tokens; t++)
            for (int v = 0; v < 2; v++) kt_store(c + t * KT_PANEL_ROWS + v * 8, sum[t][v]);
    }
}

KT_DEFINE_ALL(KT_TARGET_AVX2, 64)
static const kt_gemm_steps steps = {8, 0, 256, KT_ALL(few), unpack, copy, KT_ALL(block)};

int kt_gemm_int8_avx2(const kt_gemm *job) {
    return kt_gemm_in_steps(job, &steps);
}
