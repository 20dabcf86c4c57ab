/* AVX2 and F16C, 16 or 32 columns at a time. A group of FP4 codes is looked up in the products of its scale, as BF16, in
 * their lower and upper bytes. FP8 codes are multiplied. What is left at the end of a group, FP8 NaN, and a group whose
 * scale is not finite, are left to the scalar kernel. */
#include <immintrin.h>

#include "bf16.h"
#include "e2m1.h"
#include "kernels.h"

/* 8 float32 to BF16 (kt_to_bf16); not for NaN. */
KT_TARGET_AVX2 static inline __m128i to_bf16(__m256 x) {
    __m256i u = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    u = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1));
}

/* 16 columns: the entries of a table, by their lower and upper bytes. */
KT_TARGET_AVX2 static inline void look_up(__m128i low, __m128i high, __m128i index, uint16_t *out) {
    __m128i lower = _mm_shuffle_epi8(low, index), upper = _mm_shuffle_epi8(high, index);
    _mm_storeu_si128((__m128i *)out, _mm_unpacklo_epi8(lower, upper));
    _mm_storeu_si128((__m128i *)(out + 8), _mm_unpackhi_epi8(lower, upper));
}

/* `columns` (a multiple of 16) FP4 codes that begin at a whole byte. */
KT_TARGET_AVX2 static inline void decode_fp4(const uint8_t *codes, int64_t columns, __m256 scale, uint16_t *out) {
    /* The products of the positive values; the others are the same with the sign changed. */
    __m128i products = to_bf16(_mm256_mul_ps(_mm256_loadu_ps(kt_e2m1), scale));
    const __m128i byte = _mm_set1_epi16(0xff), nibble = _mm_set1_epi8(15);
    const __m128i signs = _mm_set_epi64x((int64_t)0x8080808080808080, 0);
    __m128i low = _mm_and_si128(products, byte), high = _mm_srli_epi16(products, 8);
    low = _mm_packus_epi16(low, low);
    high = _mm_xor_si128(_mm_packus_epi16(high, high), signs);
    for (; columns >= 32; columns -= 32, codes += 16, out += 32) {
        __m128i pairs = _mm_loadu_si128((const __m128i *)codes);
        __m128i even = _mm_and_si128(pairs, nibble), odd = _mm_and_si128(_mm_srli_epi16(pairs, 4), nibble);
        look_up(low, high, _mm_unpacklo_epi8(even, odd), out);
        look_up(low, high, _mm_unpackhi_epi8(even, odd), out + 16);
    }
    if (columns) {
        __m128i pairs = _mm_loadl_epi64((const __m128i *)codes);
        __m128i even = _mm_and_si128(pairs, nibble), odd = _mm_and_si128(_mm_srli_epi16(pairs, 4), nibble);
        look_up(low, high, _mm_unpacklo_epi8(even, odd), out);
    }
}

/* `columns` (a multiple of 16) FP8 codes; whether none was NaN. A code, shifted, is the FP16 value that is 2^-8 of its
 * own; so `scale` is 2^8 of theirs. */
KT_TARGET_AVX2 static inline int decode_fp8(const uint8_t *codes, int64_t columns, __m256 scale, uint16_t *out) {
    __m256i largest = _mm256_setzero_si256();
    for (int64_t c = 0; c < columns; c += 16) {
        __m256i code = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(codes + c)));
        __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi16(0x7f));
        largest = _mm256_max_epu16(largest, magnitude);
        __m256i sign = _mm256_slli_epi16(_mm256_xor_si256(code, magnitude), 8);
        __m256i fp16 = _mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign);
        __m256 x = _mm256_cvtph_ps(_mm256_castsi256_si128(fp16)), y = _mm256_cvtph_ps(_mm256_extracti128_si256(fp16, 1));
        _mm_storeu_si128((__m128i *)(out + c), to_bf16(_mm256_mul_ps(x, scale)));
        _mm_storeu_si128((__m128i *)(out + c + 8), to_bf16(_mm256_mul_ps(y, scale)));
    }
    return !_mm256_movemask_epi8(_mm256_cmpeq_epi16(largest, _mm256_set1_epi16(0x7f)));
}

KT_TARGET_AVX2 void kt_decode_floats_avx2(const kt_floats *row, uint16_t *out) {
    const float *scale = row->scales + row->first / row->group;
    int64_t end = row->group - row->first % row->group; /* of the group */
    for (int64_t c = 0; c < row->columns; c = end, end += row->group, scale++) {
        int64_t columns = (end < row->columns ? end : row->columns) - c, at = row->skip + c;
        int64_t whole = kt_is_finite(*scale * 0x1p8f) ? columns / 16 * 16 : 0;
        if (row->kind == KTQ_FP8_E4M3) {
            if (!decode_fp8(row->codes + at, whole, _mm256_set1_ps(*scale * 0x1p8f), out + c)) whole = 0;
        } else {
            if (at % 2) whole = 0;
            decode_fp4(row->codes + at / 2, whole, _mm256_set1_ps(*scale), out + c);
        }
        if (whole == columns) continue;
        kt_floats rest = kt_floats_of_group(row, scale, c + whole, columns - whole);
        kt_decode_floats_scalar(&rest, out + c + whole);
    }
}
