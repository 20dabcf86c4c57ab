/* Codes of 4 bits: the 16 values of a scale are made once, as BF16, and looked up (lookup_avx2.h, lookup_avx512.h); of
 * more bits: each is multiplied and rounded. */
#include "ggml_blocks.h"

enum { AT_ONCE = 2 * LANES }; /* codes: half a vector of bytes */

/* The lower halves of bytes, or their upper halves. */
TARGET static inline half_ints nibbles_of_half(half_ints bytes, int upper) {
    return half_and(upper ? half_srli_epi16(bytes, 4) : bytes, half_set1_epi8(15));
}

/* LANES columns: signed codes * scale - least. */
TARGET static inline void multiply(ints codes, floats scale, floats least, uint16_t *out) {
    store_epi32_epi16(out, to_bf16(sub_ps(mul_ps(cvtepi32_ps(codes), scale), least)));
}

/* The values of the 16 codes, times scale, less least. */
TARGET static inline table16 products(const float *values, float scale, float least) {
    floats x[16 / LANES];
    for (int v = 0; v < 16 / LANES; v++)
        x[v] = sub_ps(mul_ps(loadu_ps(values + v * LANES), set1_ps(scale)), set1_ps(least));
    return load_table(x);
}

TARGET static inline void decode_q8_0(const kt_q8_0 *block, uint16_t *out) {
    floats d = set1_ps(kt_from_fp16(kt_load16(block->d)));
    for (int c = 0; c < 32; c += LANES) multiply(load_epi8_epi32(block->q + c), d, setzero_ps(), out + c);
}

TARGET static inline void decode_q4_k(const kt_q4_k *block, uint16_t *out) {
    kt_k_scales k = kt_unpack_k_scales(block->d, block->least, block->scales);
    for (int g = 0; g < 8; g++) {
        table16 table = products(kt_nibbles, k.scale[g], k.least[g]);
        for (int c = 0; c < 32; c += AT_ONCE, out += AT_ONCE)
            look_up(table, nibbles_of_half(half_loadu(block->q + g / 2 * 32 + c), g % 2), out);
    }
}

TARGET static inline void decode_q5_k(const kt_q5_k *block, uint16_t *out) {
    kt_k_scales k = kt_unpack_k_scales(block->d, block->least, block->scales);
    for (int g = 0; g < 8; g++) {
        floats scale = set1_ps(k.scale[g]), least = set1_ps(k.least[g]);
        for (int c = 0; c < 32; c += AT_ONCE, out += AT_ONCE) {
            half_ints high = half_loadu(block->high + c); /* of which bit g becomes bit 4 */
            high = half_and(g < 4 ? half_slli_epi16(high, 4 - g) : half_srli_epi16(high, g - 4), half_set1_epi8(16));
            half_ints code = half_or(nibbles_of_half(half_loadu(block->q + g / 2 * 32 + c), g % 2), high);
            multiply(bytes_epi32(code, 0), scale, least, out);
            multiply(bytes_epi32(code, 1), scale, least, out + LANES);
        }
    }
}

TARGET static inline void decode_q6_k(const kt_q6_k *block, uint16_t *out) {
    float d = kt_from_fp16(kt_load16(block->d));
    for (int c = 0; c < 256; c += AT_ONCE) {
        int side = c / 128, quarter = c % 128 / 32, j = c % 32;
        half_ints low = nibbles_of_half(half_loadu(block->low + side * 64 + quarter % 2 * 32 + j), quarter / 2);
        half_ints high = half_srli_epi16(half_loadu(block->high + side * 32 + j), 2 * quarter);
        high = half_slli_epi16(half_and(high, half_set1_epi8(3)), 4);
        half_ints code = half_sub_epi8(half_or(low, high), half_set1_epi8(32));
        const int8_t *scales = block->scales + c / 16;
        floats first = set1_ps(d * (float)scales[0]), second = set1_ps(d * (float)scales[LANES / 16]);
        multiply(bytes_epi32(code, 0), first, setzero_ps(), out + c);
        multiply(bytes_epi32(code, 1), second, setzero_ps(), out + c + LANES);
    }
}

TARGET void KERNEL_OF(decode_blocks)(int kind, const uint8_t *blocks, int64_t count, uint16_t *out) {
    kt_block size = kt_get_block(kind);
    for (; count > 0; count--, blocks += size.bytes, out += size.columns) {
        if (!kt_has_finite_scales(kind, blocks)) {
            kt_decode_blocks_scalar(kind, blocks, 1, out);
            continue;
        }
        switch (kind) {
        case KTQ_Q4_0:
            look_up_halves(products(kt_nibbles_less_8, kt_from_fp16(kt_load16(blocks)), 0), blocks + 2, out);
            break;
        case KTQ_GGML_MXFP4:
            look_up_halves(products(kt_doubled_e2m1, kt_half_e8m0(*blocks), 0), blocks + 1, out);
            break;
        case KTQ_Q8_0: decode_q8_0((const kt_q8_0 *)blocks, out); break;
        case KTQ_Q4_K: decode_q4_k((const kt_q4_k *)blocks, out); break;
        case KTQ_Q5_K: decode_q5_k((const kt_q5_k *)blocks, out); break;
        case KTQ_Q6_K: decode_q6_k((const kt_q6_k *)blocks, out); break;
        }
    }
}
