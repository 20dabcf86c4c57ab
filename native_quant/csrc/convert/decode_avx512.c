/* AVX-512 F, BW and VL: FP16 and F32 16 values at a time, FP8 64, by table (fp8_table.h). A row that holds a NaN or a
 * scale out of the ordinary is left to the scalar kernel; so is what is left at the end of a row. */
#include "bf16_avx512.h"
#include "fp8_table.h"
#include "kernels.h"

/* decode_<kind>: `columns` values of one row; whether all were good. */

KT_TARGET_AVX512 static int decode_fp16(const uint8_t *in, int64_t columns, uint16_t *out) {
    __m256i largest = _mm256_setzero_si256();
    for (int64_t c = 0; c < columns; c += 16) {
        __m256i h = _mm256_loadu_si256((const __m256i *)(in + 2 * c));
        largest = _mm256_max_epu16(largest, _mm256_and_si256(h, _mm256_set1_epi16(0x7fff)));
        _mm256_storeu_si256((__m256i *)(out + c), _mm512_cvtepi32_epi16(to_bf16(_mm512_cvtph_ps(h))));
    }
    return !_mm256_cmpgt_epi16_mask(largest, _mm256_set1_epi16(0x7c00));
}

KT_TARGET_AVX512 static int decode_f32(const uint8_t *in, int64_t columns, uint16_t *out) {
    __m512i largest = _mm512_setzero_si512();
    for (int64_t c = 0; c < columns; c += 16) {
        __m512i u = _mm512_loadu_si512(in + 4 * c);
        largest = _mm512_max_epu32(largest, _mm512_and_si512(u, _mm512_set1_epi32(0x7fffffff)));
        _mm256_storeu_si256((__m256i *)(out + c), _mm512_cvtepi32_epi16(to_bf16(_mm512_castsi512_ps(u))));
    }
    return !_mm512_cmpgt_epi32_mask(largest, _mm512_set1_epi32(0x7f800000));
}

typedef struct {
    __m512i normal_low, normal_high, subnormal_low, subnormal_high; /* the same 16 bytes in each lane */
} table;

KT_TARGET_AVX512 static inline table make_table(float scale) {
    __m512 factor = _mm512_set1_ps(scale);
    __m256i normal = _mm512_cvtepi32_epi16(to_bf16(_mm512_mul_ps(_mm512_loadu_ps(kt_fp8_entries), factor)));
    __m256i subnormal = _mm512_cvtepi32_epi16(to_bf16(_mm512_mul_ps(_mm512_loadu_ps(kt_fp8_entries + 16), factor)));
    table t;
    t.normal_low = _mm512_broadcast_i32x4(_mm256_cvtepi16_epi8(normal));
    t.normal_high = _mm512_broadcast_i32x4(_mm256_cvtepi16_epi8(_mm256_srli_epi16(normal, 8)));
    t.subnormal_low = _mm512_broadcast_i32x4(_mm256_cvtepi16_epi8(subnormal));
    t.subnormal_high = _mm512_broadcast_i32x4(_mm256_cvtepi16_epi8(_mm256_srli_epi16(subnormal, 8)));
    return t;
}

KT_TARGET_AVX512 static int decode_fp8(const uint8_t *in, int64_t columns, const table *t, uint16_t *out) {
    /* vpunpck[lh]bw work within 128-bit lanes; with the 64-bit pieces in this order their results are in the order of
     * columns. */
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    __m512i largest = _mm512_setzero_si512();
    for (int64_t c = 0; c < columns; c += 64) {
        __m512i code = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(in + c));
        __m512i magnitude = _mm512_and_si512(code, _mm512_set1_epi8(0x7f));
        largest = _mm512_max_epu8(largest, magnitude);
        __mmask64 subnormal = _mm512_cmplt_epu8_mask(magnitude, _mm512_set1_epi8(8));
        __m512i low = _mm512_shuffle_epi8(t->normal_low, magnitude),
                high = _mm512_shuffle_epi8(t->normal_high, magnitude);
        low = _mm512_mask_shuffle_epi8(low, subnormal, t->subnormal_low, magnitude);
        high = _mm512_mask_shuffle_epi8(high, subnormal, t->subnormal_high, magnitude);
        high = _mm512_add_epi8(high, _mm512_and_si512(_mm512_srli_epi16(code, 4), _mm512_set1_epi8(7)));
        high = _mm512_ternarylogic_epi32(high, code, _mm512_set1_epi8((char)0x80), 0x78); /* high ^ (code & 0x80) */
        _mm512_storeu_si512(out + c, _mm512_unpacklo_epi8(low, high));
        _mm512_storeu_si512(out + c + 32, _mm512_unpackhi_epi8(low, high));
    }
    return !_mm512_cmpeq_epi8_mask(largest, _mm512_set1_epi8(0x7f));
}

KT_TARGET_AVX512 void kt_decode_avx512(int kind, const uint8_t *in, int64_t in_stride, int64_t rows, int64_t columns,
                                       float scale, uint16_t *out, int64_t out_pitch) {
    int64_t whole = kind != KTQ_FP8_E4M3 ? columns / 16 * 16 : kt_fp8_table_holds(scale) ? columns / 64 * 64 : 0;
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
