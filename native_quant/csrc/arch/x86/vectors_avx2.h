/* The vectors of a template (FAMILY_template.h) as AVX2 has them: 32 bytes. */
#ifndef KT_VECTORS_AVX2_H
#define KT_VECTORS_AVX2_H

#include <immintrin.h>

#include "kernels.h"

#define TARGET KT_TARGET_AVX2
#define KERNEL_OF(family) kt_##family##_avx2
/* The 32-bit words and the bytes of a vector; the number of vector registers. */
enum { LANES = 8, VECTOR_BYTES = 32, REGISTERS = 16 };

typedef __m256 floats;
typedef __m256i ints, mask; /* mask: all bits of a lane are equal */
typedef __m128i half_ints;

#define OF_WIDTH(name) _mm256_##name
#define OF_HALF(name) _mm_##name
#define SI(name) _mm256_##name##_si256
#define HALF_SI(name) _mm_##name##_si128
#define repeated _mm256_broadcastsi128_si256
#include "vectors.h"

#define FETCH_AHEAD(p) _mm_prefetch((const char *)(p), _MM_HINT_T1) /* for the next rows */

#define castsi_ps _mm256_castsi256_ps
#define fetch(p) _mm_prefetch((const char *)(p), _MM_HINT_T0)
#define joined(low, high) _mm256_set_m128i(high, low)
#define round_ps(x) _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define gather_ps(from, index) _mm256_i32gather_ps(from, index, 4)

/* Words from narrower numbers. */
#define load_epu8_epi32(p) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p)))
#define load_epi8_epi32(p) _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p)))
#define load_epu16_epi32(p) _mm256_cvtepu16_epi32(half_loadu(p))
#define load_epi8_epi16(p) _mm256_cvtepi8_epi16(half_loadu(p))
/* The first or second LANES of 2 * LANES bytes, or of as many FP16 values. */
#define halves_ps(x, second) _mm256_cvtph_ps((second) ? _mm256_extracti128_si256(x, 1) : _mm256_castsi256_si128(x))
#define bytes_epi32(x, second) _mm256_cvtepi8_epi32((second) ? _mm_srli_si128(x, 8) : (x))
#define load_epu8_epi16(p) _mm256_cvtepu8_epi16(half_loadu(p))
#define load_ph_ps(p) _mm256_cvtph_ps(half_loadu(p))

/* 16 bytes from each of two places. */
TARGET static inline ints load_strided(const uint8_t *p, int64_t stride) {
    return joined(half_loadu(p), half_loadu(p + stride));
}

/* Words of at most 65535 as 16 bits. */
TARGET static inline half_ints narrow_epi32(ints x) {
    return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}
TARGET static inline void store_epi32_epi16(void *p, ints x) {
    _mm_storeu_si128((__m128i *)p, narrow_epi32(x));
}
/* The lowest byte of each word. */
TARGET static inline void store_epi32_epi8(void *p, ints x) {
    const ints lowest = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12));
    x = shuffle_epi8(x, lowest);
    _mm_storel_epi64((__m128i *)p, _mm_unpacklo_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}

/* 16 bits, -128 to 127, as bytes. */
TARGET static inline void store_epi16_epi8(void *p, ints x) {
    _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}

/* Restores the order after packing once or twice within 128 bits, or prepares it for unpacking. */
#define after_pack(x) _mm256_permute4x64_epi64(x, 0xd8)
#define after_packs(x) _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
#define before_unpack(x) _mm256_permute4x64_epi64(x, 0xd8)

#define gt_epi8 _mm256_cmpgt_epi8
#define eq_epi16 _mm256_cmpeq_epi16
#define eq_epi32 _mm256_cmpeq_epi32
#define gt_epi32 _mm256_cmpgt_epi32
#define nan_ps(x) _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q))
#define where_epi8(mask, then, otherwise) _mm256_blendv_epi8(otherwise, then, mask)
#define where_epi16 where_epi8
#define where_epi32 where_epi8
/* x, less 1 where y is negative. */
#define less_if_negative_epi8(x, y) add_epi8(x, gt_epi8(setzero_si(), y))
#define odd_epi16(odd, even) _mm256_blend_epi16(even, odd, 0xaa)
/* Bits of `then` where `bits` has one. */
#define where_bits(bits, then, otherwise) or_si(and_si(bits, then), SI(andnot)(bits, otherwise))

TARGET static inline int any_gt_epi32(ints a, ints b) {
    return _mm256_movemask_epi8(gt_epi32(a, b));
}
TARGET static inline int any_gt_epu8(ints a, ints b) {
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(max_epu8(a, b), b)) != -1;
}

TARGET static inline int32_t reduce_add_epi32(ints x) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
TARGET static inline uint32_t reduce_max_epu32(ints x) {
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1)));
}
/* vphminposuw finds the smallest of 8: of the complements. */
TARGET static inline uint16_t reduce_max_epu16(ints x) {
    __m128i m = _mm_max_epu16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    return (uint16_t)~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(m, _mm_set1_epi16(-1))), 0);
}

/* out[i], word j = in[j], word i. */
TARGET static inline void transpose_words(const ints *in, ints *out) {
    ints transposed[2][4];
    for (int g = 0; g < 2; g++) transpose_blocks(in + 4 * g, transposed[g]);
    for (int q = 0; q < 4; q++) {
        out[q] = _mm256_permute2x128_si256(transposed[0][q], transposed[1][q], 0x20);
        out[4 + q] = _mm256_permute2x128_si256(transposed[0][q], transposed[1][q], 0x31);
    }
}

/* The same of items of 64 bits. */
TARGET static inline void transpose_double_words(const ints *in, ints *out) {
    for (int i = 0; i < 2; i++) {
        ints a = i ? _mm256_unpackhi_epi64(in[0], in[1]) : _mm256_unpacklo_epi64(in[0], in[1]);
        ints b = i ? _mm256_unpackhi_epi64(in[2], in[3]) : _mm256_unpacklo_epi64(in[2], in[3]);
        out[i] = _mm256_permute2x128_si256(a, b, 0x20);
        out[2 + i] = _mm256_permute2x128_si256(a, b, 0x31);
    }
}

#endif
