/* AVX-512 F, BW and VL. Codes of 4 bits: the 16 values of a scale are made once, as BF16, and looked up; of more bits:
 * each is multiplied and rounded. */
#include "bf16_avx512.h"
#include "ggml_blocks.h"

/* 32 bytes, lower halves or upper halves. */
KT_TARGET_AVX512 static inline __m256i half(__m256i bytes, int upper) {
    return _mm256_and_si256(upper ? _mm256_srli_epi16(bytes, 4) : bytes, _mm256_set1_epi8(15));
}

KT_TARGET_AVX512 static inline __m256i load(const uint8_t *bytes) {
    return _mm256_loadu_si256((const __m256i *)bytes);
}

/* 16 columns: signed codes * scale - least. */
KT_TARGET_AVX512 static inline void multiply(__m128i codes, __m512 scale, __m512 least, uint16_t *out) {
    __m512 x = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
    x = _mm512_sub_ps(_mm512_mul_ps(x, scale), least);
    _mm256_storeu_si256((__m256i *)out, _mm512_cvtepi32_epi16(to_bf16(x)));
}

/* 32 columns: the values of the 16 codes, times scale, less least, of these codes. */
KT_TARGET_AVX512 static inline void look_up(const float *values, float scale, float least, __m256i codes,
                                            uint16_t *out) {
    __m512 x = _mm512_mul_ps(_mm512_loadu_ps(values), _mm512_set1_ps(scale));
    __m256i table = _mm512_cvtepi32_epi16(to_bf16(_mm512_sub_ps(x, _mm512_set1_ps(least))));
    __m512i index = _mm512_cvtepu8_epi16(codes);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(index, _mm512_castsi256_si512(table)));
}

/* 32 columns: those of the lower halves of 16 bytes, then those of the upper. */
KT_TARGET_AVX512 static inline void decode_pairs(const uint8_t *q, const float *values, float scale, uint16_t *out) {
    __m128i pairs = _mm_loadu_si128((const __m128i *)q);
    __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(pairs), _mm_srli_epi16(pairs, 4), 1);
    look_up(values, scale, 0, half(both, 0), out);
}

KT_TARGET_AVX512 static inline void decode_q8_0(const kt_q8_0 *block, uint16_t *out) {
    __m512 d = _mm512_set1_ps(kt_from_fp16(kt_load16(block->d)));
    for (int c = 0; c < 32; c += 16)
        multiply(_mm_loadu_si128((const __m128i *)(block->q + c)), d, _mm512_setzero_ps(), out + c);
}

KT_TARGET_AVX512 static inline void decode_q4_k(const kt_q4_k *block, uint16_t *out) {
    kt_k_scales k = kt_k_scales_of(block->d, block->least, block->scales);
    for (int g = 0; g < 8; g++, out += 32)
        look_up(kt_nibbles, k.scale[g], k.least[g], half(load(block->q + g / 2 * 32), g % 2), out);
}

KT_TARGET_AVX512 static inline void decode_q5_k(const kt_q5_k *block, uint16_t *out) {
    kt_k_scales k = kt_k_scales_of(block->d, block->least, block->scales);
    __m256i high = load(block->high);
    for (int g = 0; g < 8; g++, out += 32) {
        __mmask32 set = _mm256_test_epi8_mask(high, _mm256_set1_epi8((char)(1 << g)));
        __m256i code = half(load(block->q + g / 2 * 32), g % 2);
        code = _mm256_mask_add_epi8(code, set, code, _mm256_set1_epi8(16));
        __m512 scale = _mm512_set1_ps(k.scale[g]), least = _mm512_set1_ps(k.least[g]);
        multiply(_mm256_castsi256_si128(code), scale, least, out);
        multiply(_mm256_extracti128_si256(code, 1), scale, least, out + 16);
    }
}

KT_TARGET_AVX512 static inline void decode_q6_k(const kt_q6_k *block, uint16_t *out) {
    float d = kt_from_fp16(kt_load16(block->d));
    for (int c = 0; c < 256; c += 32) {
        int side = c / 128, quarter = c % 128 / 32;
        __m256i low = half(load(block->low + side * 64 + quarter % 2 * 32), quarter / 2);
        __m256i high = _mm256_srl_epi16(load(block->high + side * 32), _mm_cvtsi32_si128(2 * quarter));
        high = _mm256_slli_epi16(_mm256_and_si256(high, _mm256_set1_epi8(3)), 4);
        __m256i code = _mm256_sub_epi8(_mm256_or_si256(low, high), _mm256_set1_epi8(32));
        const int8_t *scales = block->scales + c / 16;
        multiply(_mm256_castsi256_si128(code), _mm512_set1_ps(d * (float)scales[0]), _mm512_setzero_ps(), out + c);
        multiply(_mm256_extracti128_si256(code, 1), _mm512_set1_ps(d * (float)scales[1]), _mm512_setzero_ps(),
                 out + c + 16);
    }
}

KT_TARGET_AVX512 void kt_decode_blocks_avx512(int kind, const uint8_t *blocks, int64_t count, uint16_t *out) {
    kt_block size = kt_block_of(kind);
    for (; count > 0; count--, blocks += size.bytes, out += size.columns) {
        if (!kt_has_finite_scales(kind, blocks)) {
            kt_decode_blocks_scalar(kind, blocks, 1, out);
            continue;
        }
        switch (kind) {
        case KTQ_Q4_0: decode_pairs(blocks + 2, kt_nibbles_less_8, kt_from_fp16(kt_load16(blocks)), out); break;
        case KTQ_GGML_MXFP4: decode_pairs(blocks + 1, kt_doubled_e2m1, kt_half_of_e8m0(*blocks), out); break;
        case KTQ_Q8_0: decode_q8_0((const kt_q8_0 *)blocks, out); break;
        case KTQ_Q4_K: decode_q4_k((const kt_q4_k *)blocks, out); break;
        case KTQ_Q5_K: decode_q5_k((const kt_q5_k *)blocks, out); break;
        case KTQ_Q6_K: decode_q6_k((const kt_q6_k *)blocks, out); break;
        }
    }
}
