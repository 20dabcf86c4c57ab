/* The vectors of a template (FAMILY_template.h) as AVX-512 F, BW, VL and DQ have them: 64 bytes. */
#ifndef KT_VECTORS_AVX512_H
#define KT_VECTORS_AVX512_H

#include <immintrin.h>

#include "kernels.h"

#define TARGET KT_TARGET_AVX512
#define KERNEL_OF(family) kt_##family##_avx512
/* The 32-bit words and the bytes of a vector; the number of vector registers. */
enum { LANES = 16, VECTOR_BYTES = 64, REGISTERS = 32 };

typedef __m512 floats;
typedef __m512i ints;
typedef __m256i half_ints;
typedef __mmask64 mask; /* one bit for each lane */

#define OF_WIDTH(name) _mm512_##name
#define OF_HALF(name) _mm256_##name
#define SI(name) _mm512_##name##_si512
#define HALF_SI(name) _mm256_##name##_si256
#define repeated _mm512_broadcast_i32x4
#include "vectors.h"

/* Prefetches the next rows into L1, from where they are evicted to L2: with many prefetches in flight, those into L2
   are partly dropped (Emerald Rapids: 64 KiB that had been prefetched were read at a third of L2's speed). */
#define FETCH_AHEAD(p) _mm_prefetch((const char *)(p), _MM_HINT_T0)

#define castsi_ps _mm512_castsi512_ps
#define fetch(p) _mm_prefetch((const char *)(p), _MM_HINT_T0)
#define joined(low, high) _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1)
#define round_ps(x) _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define gather_ps(from, index) _mm512_i32gather_ps(index, from, 4)

/* Words from narrower numbers. */
#define load_epu8_epi32(p) _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define load_epi8_epi32(p) _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define load_epu16_epi32(p) _mm512_cvtepu16_epi32(half_loadu(p))
#define load_epi8_epi16(p) _mm512_cvtepi8_epi16(half_loadu(p))
/* The first or second LANES of 2 * LANES bytes, or of as many FP16 values. */
#define halves_ps(x, second) _mm512_cvtph_ps((second) ? _mm512_extracti64x4_epi64(x, 1) : _mm512_castsi512_si256(x))
#define bytes_epi32(x, second) \
    _mm512_cvtepi8_epi32((second) ? _mm256_extracti128_si256(x, 1) : _mm256_castsi256_si128(x))
#define load_epu8_epi16(p) _mm512_cvtepu8_epi16(half_loadu(p))
#define load_ph_ps(p) _mm512_cvtph_ps(half_loadu(p))

/* 16 bytes from each of four places. */
TARGET static inline ints load_strided(const uint8_t *p, int64_t stride) {
    ints x = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)p));
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(p + stride)), 1);
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(p + 2 * stride)), 2);
    return _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(p + 3 * stride)), 3);
}

/* Words of at most 65535 as 16 bits. */
#define narrow_epi32 _mm512_cvtepi32_epi16
#define store_epi32_epi16(p, x) _mm256_storeu_si256((__m256i *)(p), _mm512_cvtepi32_epi16(x))
/* The lowest byte of each word. */
#define store_epi32_epi8(p, x) _mm_storeu_si128((__m128i *)(p), _mm512_cvtepi32_epi8(x))
/* 16 bits, -128 to 127, as bytes. */
#define store_epi16_epi8(p, x) _mm256_storeu_si256((__m256i *)(p), _mm512_cvtepi16_epi8(x))

/* Restores the order after packing once or twice within 128 bits, or prepares it for unpacking. */
#define after_pack(x) _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), x)
#define after_packs(x) \
    _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), x)
#define before_unpack(x) _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), x)

#define gt_epi8 _mm512_cmpgt_epi8_mask
#define eq_epi16 _mm512_cmpeq_epi16_mask
#define eq_epi32 _mm512_cmpeq_epi32_mask
#define gt_epi32 _mm512_cmpgt_epi32_mask
#define nan_ps(x) _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q)
#define where_epi8(mask, then, otherwise) _mm512_mask_mov_epi8(otherwise, mask, then)
#define where_epi16(mask, then, otherwise) _mm512_mask_mov_epi16(otherwise, (__mmask32)(mask), then)
#define where_epi32(mask, then, otherwise) _mm512_mask_mov_epi32(otherwise, (__mmask16)(mask), then)
/* x, less 1 where y is negative. */
#define less_if_negative_epi8(x, y) _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(y), x, set1_epi8(1))
#define odd_epi16(odd, even) _mm512_mask_mov_epi16(even, 0xaaaaaaaa, odd)
/* Bits of `then` where `bits` has one. */
#define where_bits(bits, then, otherwise) _mm512_ternarylogic_epi32(bits, then, otherwise, 0xca)

#define any_gt_epi32(a, b) (_mm512_cmpgt_epi32_mask(a, b) != 0)
#define any_gt_epu8(a, b) (_mm512_cmpgt_epu8_mask(a, b) != 0)

#define reduce_add_epi32 _mm512_reduce_add_epi32
#define reduce_max_epu32 _mm512_reduce_max_epu32
/* vphminposuw finds the smallest of 8: of the complements. */
TARGET static inline uint16_t reduce_max_epu16(ints x) {
    __m256i y = _mm256_max_epu16(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
    __m128i m = _mm_max_epu16(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
    return (uint16_t)~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(m, _mm_set1_epi16(-1))), 0);
}

/* out[step * i], 128 bits number j = in[step * j], 128 bits number i. */
TARGET static inline void transpose_lanes(int step, const ints *in, ints *out) {
    ints a = in[0], b = in[step], c = in[2 * step], d = in[3 * step];
    ints ab02 = _mm512_shuffle_i32x4(a, b, 0x88), ab13 = _mm512_shuffle_i32x4(a, b, 0xdd); /* lanes 0 2, 1 3 */
    ints cd02 = _mm512_shuffle_i32x4(c, d, 0x88), cd13 = _mm512_shuffle_i32x4(c, d, 0xdd);
    out[0] = _mm512_shuffle_i32x4(ab02, cd02, 0x88);
    out[step] = _mm512_shuffle_i32x4(ab13, cd13, 0x88);
    out[2 * step] = _mm512_shuffle_i32x4(ab02, cd02, 0xdd);
    out[3 * step] = _mm512_shuffle_i32x4(ab13, cd13, 0xdd);
}

/* out[i], word j = in[j], word i. Two rounds of interleaving 32- and 64-bit items turn each 4 x 4 block of words that
   shares a lane; two rounds of moving lanes bring those of one column together. */
TARGET static inline void transpose_words(const ints *in, ints *out) {
    ints transposed[16];
    for (int g = 0; g < 16; g += 4) transpose_blocks(in + g, transposed + g);
    for (int q = 0; q < 4; q++) transpose_lanes(4, transposed + q, out + q);
}

/* The same of items of 64 bits. */
TARGET static inline void transpose_double_words(const ints *in, ints *out) {
    ints transposed[8];
    for (int i = 0; i < 8; i += 2) {
        transposed[i] = _mm512_unpacklo_epi64(in[i], in[i + 1]);
        transposed[i + 1] = _mm512_unpackhi_epi64(in[i], in[i + 1]);
    }
    for (int i = 0; i < 2; i++) transpose_lanes(2, transposed + i, out + i);
}

#endif
