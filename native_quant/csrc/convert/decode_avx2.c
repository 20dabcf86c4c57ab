/* AVX2 and F16C: FP16 and F32 8 values at a time, FP8 32, by table (fp8_table.h). A row that holds a NaN or a scale out
 * of the ordinary is left to the scalar kernel; so is what is left at the end of a row. */
#include "bf16_avx2.h"
#include "fp8_table.h"
#include "kernels.h"

/* decode_<kind>: `columns` values of one row; whether all were good. */

KT_TARGET_AVX2 static int decode_fp16(const uint8_t *in, int64_t columns, uint16_t *out) {
    __m128i largest = _mm_setzero_si128();
    for (int64_t c = 0; c < columns; c += 8) {
        __m128i h = _mm_loadu_si128((const __m128i *)(in + 2 * c));
        largest = _mm_max_epu16(largest, _mm_and_si128(h, _mm_set1_epi16(0x7fff)));
        _mm_storeu_si128((__m128i *)(out + c), narrow(to_bf16(_mm256_cvtph_ps(h))));
    }
    return !_mm_movemask_epi8(_mm_cmpgt_epi16(largest, _mm_set1_epi16(0x7c00)));
}

KT_TARGET_AVX2 static int decode_f32(const uint8_t *in, int64_t columns, uint16_t *out) {
    __m256i largest = _mm256_setzero_si256();
    for (int64_t c = 0; c < columns; c += 8) {
        __m256i u = _mm256_loadu_si256((const __m256i *)(in + 4 * c));
        largest = _mm256_max_epu32(largest, _mm256_and_si256(u, _mm256_set1_epi32(0x7fffffff)));
        _mm_storeu_si128((__m128i *)(out + c), narrow(to_bf16(_mm256_castsi256_ps(u))));
    }
    return !_mm256_movemask_epi8(_mm256_cmpgt_epi32(largest, _mm256_set1_epi32(0x7f800000)));
}

typedef struct {
    __m256i normal_low, normal_high, subnormal_low, subnormal_high; /* the same 16 bytes in each lane */
} table;

KT_TARGET_AVX2 static inline __m128i entries(int first, float scale) {
    return narrow(to_bf16(_mm256_mul_ps(_mm256_loadu_ps(kt_fp8_entries + first), _mm256_set1_ps(scale))));
}

/* The lower or upper bytes of two registers of BF16, in both lanes. */
KT_TARGET_AVX2 static inline __m256i lower_bytes(__m128i a, __m128i b) {
    const __m128i low = _mm_set1_epi16(0xff);
    return _mm256_broadcastsi128_si256(_mm_packus_epi16(_mm_and_si128(a, low), _mm_and_si128(b, low)));
}
KT_TARGET_AVX2 static inline __m256i upper_bytes(__m128i a, __m128i b) {
    return lower_bytes(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8));
}

KT_TARGET_AVX2 static inline table make_table(float scale) {
    __m128i a = entries(0, scale), b = entries(8, scale), c = entries(16, scale), d = entries(24, scale);
    table t = {lower_bytes(a, b), upper_bytes(a, b), lower_bytes(c, d), upper_bytes(c, d)};
    return t;
}

KT_TARGET_AVX2 static int decode_fp8(const uint8_t *in, int64_t columns, const table *t, uint16_t *out) {
    __m256i largest = _mm256_setzero_si256();
    for (int64_t c = 0; c < columns; c += 32) {
        /* vpunpck[lh]bw work within 128-bit lanes; with the 64-bit pieces as 0 2 1 3 their results are in the order of
         * columns. */
        __m256i code = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i *)(in + c)), 0xd8);
        __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi8(0x7f));
        largest = _mm256_max_epu8(largest, magnitude);
        __m256i subnormal = _mm256_cmpgt_epi8(_mm256_set1_epi8(8), magnitude);
        __m256i low = _mm256_blendv_epi8(_mm256_shuffle_epi8(t->normal_low, magnitude),
                                         _mm256_shuffle_epi8(t->subnormal_low, magnitude), subnormal);
        __m256i high = _mm256_blendv_epi8(_mm256_shuffle_epi8(t->normal_high, magnitude),
                                          _mm256_shuffle_epi8(t->subnormal_high, magnitude), subnormal);
        high = _mm256_add_epi8(high, _mm256_and_si256(_mm256_srli_epi16(code, 4), _mm256_set1_epi8(7)));
        high = _mm256_xor_si256(high, _mm256_and_si256(code, _mm256_set1_epi8((char)0x80)));
        _mm256_storeu_si256((__m256i *)(out + c), _mm256_unpacklo_epi8(low, high));
        _mm256_storeu_si256((__m256i *)(out + c + 16), _mm256_unpackhi_epi8(low, high));
    }
    return !_mm256_movemask_epi8(_mm256_cmpeq_epi8(largest, _mm256_set1_epi8(0x7f)));
}

KT_TARGET_AVX2 void kt_decode_avx2(int kind, const uint8_t *in, int64_t in_stride, int64_t rows, int64_t columns,
                                   float scale, uint16_t *out, int64_t out_pitch) {
    int64_t whole = kind != KTQ_FP8_E4M3 ? columns / 8 * 8 : kt_fp8_table_holds(scale) ? columns / 32 * 32 : 0;
    table t;
    if (kind == KTQ_FP8_E4M3 && whole) t = make_table(scale);
    for (int64_t r = 0; r < rows; r++, in += in_stride, out += out_pitch) {
        int good = kind == KTQ_FP16 ? decode_fp16(in, whole, out)
                   : kind == KTQ_F32 ? decode_f32(in, whole, out)
                                     : decode_fp8(in, whole, &t, out);
        int64_t done = good ? whole : 0;
        if (done < columns)
            kt_decode_scalar(kind, in + done * kt_column_bits(kind) / 8, 0, 1, columns - done, scale, out + done, 0);
    }
}
