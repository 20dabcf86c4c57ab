/* AVX2. Codes of 4 bits: the 16 values of a scale are made once, as BF16, and looked up in their lower and upper bytes;
 * of more bits: each is multiplied and rounded. */
#include "bf16_avx2.h"
#include "ggml_blocks.h"

/* 16 bytes, lower halves or upper halves. */
KT_TARGET_AVX2 static inline __m128i half(__m128i bytes, int upper) {
    return _mm_and_si128(upper ? _mm_srli_epi16(bytes, 4) : bytes, _mm_set1_epi8(15));
}

KT_TARGET_AVX2 static inline __m128i load(const uint8_t *bytes) {
    return _mm_loadu_si128((const __m128i *)bytes);
}

/* 16 columns: signed codes * scale - least. */
KT_TARGET_AVX2 static inline void multiply(__m128i codes, __m256 scale, __m256 least, uint16_t *out) {
    __m256 a = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
    __m256 b = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8)));
    a = _mm256_sub_ps(_mm256_mul_ps(a, scale), least);
    b = _mm256_sub_ps(_mm256_mul_ps(b, scale), least);
    _mm_storeu_si128((__m128i *)out, narrow(to_bf16(a)));
    _mm_storeu_si128((__m128i *)(out + 8), narrow(to_bf16(b)));
}

/* The values of the 16 codes, times scale, less least. */
KT_TARGET_AVX2 static inline table16 products(const float *values, float scale, float least) {
    __m256 d = _mm256_set1_ps(scale), m = _mm256_set1_ps(least);
    return table_of(_mm256_sub_ps(_mm256_mul_ps(_mm256_loadu_ps(values), d), m),
                    _mm256_sub_ps(_mm256_mul_ps(_mm256_loadu_ps(values + 8), d), m));
}

/* 32 columns: those of the lower halves, then those of the upper. */
KT_TARGET_AVX2 static inline void decode_pairs(const uint8_t *q, table16 table, uint16_t *out) {
    look_up(table, half(load(q), 0), out);
    look_up(table, half(load(q), 1), out + 16);
}

KT_TARGET_AVX2 static inline void decode_q8_0(const kt_q8_0 *block, uint16_t *out) {
    __m256 d = _mm256_set1_ps(kt_from_fp16(kt_load16(block->d)));
    for (int c = 0; c < 32; c += 16) multiply(load((const uint8_t *)block->q + c), d, _mm256_setzero_ps(), out + c);
}

KT_TARGET_AVX2 static inline void decode_q4_k(const kt_q4_k *block, uint16_t *out) {
    kt_k_scales k = kt_k_scales_of(block->d, block->least, block->scales);
    for (int g = 0; g < 8; g++, out += 32) {
        table16 table = products(kt_nibbles, k.scale[g], k.least[g]);
        const uint8_t *q = block->q + g / 2 * 32;
        look_up(table, half(load(q), g % 2), out);
        look_up(table, half(load(q + 16), g % 2), out + 16);
    }
}

KT_TARGET_AVX2 static inline void decode_q5_k(const kt_q5_k *block, uint16_t *out) {
    kt_k_scales k = kt_k_scales_of(block->d, block->least, block->scales);
    for (int g = 0; g < 8; g++) {
        __m256 d = _mm256_set1_ps(k.scale[g]), least = _mm256_set1_ps(k.least[g]);
        __m128i bit = _mm_set1_epi8((char)(1 << g));
        for (int c = 0; c < 32; c += 16, out += 16) {
            __m128i set = _mm_cmpeq_epi8(_mm_and_si128(load(block->high + c), bit), bit);
            __m128i code = half(load(block->q + g / 2 * 32 + c), g % 2);
            multiply(_mm_or_si128(code, _mm_and_si128(set, _mm_set1_epi8(16))), d, least, out);
        }
    }
}

KT_TARGET_AVX2 static inline void decode_q6_k(const kt_q6_k *block, uint16_t *out) {
    float d = kt_from_fp16(kt_load16(block->d));
    for (int c = 0; c < 256; c += 16) {
        int side = c / 128, quarter = c % 128 / 32, j = c % 32;
        __m128i low = half(load(block->low + side * 64 + quarter % 2 * 32 + j), quarter / 2);
        __m128i high = _mm_srl_epi16(load(block->high + side * 32 + j), _mm_cvtsi32_si128(2 * quarter));
        high = _mm_slli_epi16(_mm_and_si128(high, _mm_set1_epi8(3)), 4);
        __m128i code = _mm_sub_epi8(_mm_or_si128(low, high), _mm_set1_epi8(32));
        multiply(code, _mm256_set1_ps(d * (float)block->scales[c / 16]), _mm256_setzero_ps(), out + c);
    }
}

KT_TARGET_AVX2 void kt_decode_blocks_avx2(int kind, const uint8_t *blocks, int64_t count, uint16_t *out) {
    kt_block size = kt_block_of(kind);
    for (; count > 0; count--, blocks += size.bytes, out += size.columns) {
        if (!kt_has_finite_scales(kind, blocks)) {
            kt_decode_blocks_scalar(kind, blocks, 1, out);
            continue;
        }
        switch (kind) {
        case KTQ_Q4_0:
            decode_pairs(blocks + 2, products(kt_nibbles_less_8, kt_from_fp16(kt_load16(blocks)), 0), out);
            break;
        case KTQ_GGML_MXFP4:
            decode_pairs(blocks + 1, products(kt_doubled_e2m1, kt_half_of_e8m0(*blocks), 0), out);
            break;
        case KTQ_Q8_0: decode_q8_0((const kt_q8_0 *)blocks, out); break;
        case KTQ_Q4_K: decode_q4_k((const kt_q4_k *)blocks, out); break;
        case KTQ_Q5_K: decode_q5_k((const kt_q5_k *)blocks, out); break;
        case KTQ_Q6_K: decode_q6_k((const kt_q6_k *)blocks, out); break;
        }
    }
}
