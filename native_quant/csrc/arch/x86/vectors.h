/* The operations of the templates (FAMILY_template.h) that x86 names alike at every width, and those that are made of
 * them. vectors_avx2.h and vectors_avx512.h define OF_WIDTH, SI and, for half as many bytes, OF_HALF and HALF_SI,
 * which add the prefix and the suffix of a width, and have the operations that are more than a name; another
 * architecture's header defines all of these. A name is Intel's without the prefix and the width. */
#ifndef KT_VECTORS_H
#define KT_VECTORS_H

/* Computes a vector here, so that it stays in its register: GCC would put off all products of a loop. */
#define KEEP_IN_REGISTER(vector) __asm__("" : KT_IN_REGISTER(vector))

#define add_ps OF_WIDTH(add_ps)
#define sub_ps OF_WIDTH(sub_ps)
#define mul_ps OF_WIDTH(mul_ps)
#define div_ps OF_WIDTH(div_ps)
#define fmadd_ps OF_WIDTH(fmadd_ps)   /* a * b + c, rounded once */
#define fnmadd_ps OF_WIDTH(fnmadd_ps) /* c - a * b, rounded once */
#define min_ps OF_WIDTH(min_ps)       /* min and max return the second operand if one is NaN */
#define max_ps OF_WIDTH(max_ps)
#define set1_ps OF_WIDTH(set1_ps)
#define setzero_ps OF_WIDTH(setzero_ps)
#define load_ps OF_WIDTH(load_ps)
#define loadu_ps OF_WIDTH(loadu_ps)
#define store_ps OF_WIDTH(store_ps)
#define storeu_ps OF_WIDTH(storeu_ps)
#define cvtps_epi32 OF_WIDTH(cvtps_epi32) /* to nearest even */
#define cvttps_epi32 OF_WIDTH(cvttps_epi32) /* towards 0 */
#define cvtepi32_ps OF_WIDTH(cvtepi32_ps)

#define set1_epi8(x) OF_WIDTH(set1_epi8)((char)(x))
#define set1_epi16(x) OF_WIDTH(set1_epi16)((short)(x))
#define set1_epi32(x) OF_WIDTH(set1_epi32)((int)(x))
#define abs_epi8 OF_WIDTH(abs_epi8)
#define add_epi8 OF_WIDTH(add_epi8)
#define add_epi16 OF_WIDTH(add_epi16)
#define add_epi32 OF_WIDTH(add_epi32)
#define sub_epi8 OF_WIDTH(sub_epi8)
#define sub_epi16 OF_WIDTH(sub_epi16)
#define sub_epi32 OF_WIDTH(sub_epi32)
#define slli_epi16 OF_WIDTH(slli_epi16)
#define slli_epi32 OF_WIDTH(slli_epi32)
#define srli_epi16 OF_WIDTH(srli_epi16)
#define srli_epi32 OF_WIDTH(srli_epi32)
#define srai_epi16 OF_WIDTH(srai_epi16)
#define max_epu8 OF_WIDTH(max_epu8)
#define min_epu16 OF_WIDTH(min_epu16)
#define max_epu16 OF_WIDTH(max_epu16)
#define min_epi32 OF_WIDTH(min_epi32)
#define max_epi32 OF_WIDTH(max_epi32)
#define max_epu32 OF_WIDTH(max_epu32)
#define mullo_epi16 OF_WIDTH(mullo_epi16)
#define mullo_epi32 OF_WIDTH(mullo_epi32)
#define madd_epi16 OF_WIDTH(madd_epi16)
#define maddubs_epi16 OF_WIDTH(maddubs_epi16)

/* Within each 128 bits. */
#define packs_epi16 OF_WIDTH(packs_epi16)
#define packs_epi32 OF_WIDTH(packs_epi32)
#define packus_epi16 OF_WIDTH(packus_epi16)
#define packus_epi32 OF_WIDTH(packus_epi32)
#define shuffle_epi8 OF_WIDTH(shuffle_epi8)
#define unpacklo_epi8 OF_WIDTH(unpacklo_epi8)
#define unpackhi_epi8 OF_WIDTH(unpackhi_epi8)
#define unpacklo_epi16 OF_WIDTH(unpacklo_epi16)
#define unpackhi_epi16 OF_WIDTH(unpackhi_epi16)

#define castps_si SI(castps)
#define setzero_si SI(setzero)
#define and_si SI(and)
#define or_si SI(or)
#define xor_si SI(xor)
#define load_si(p) SI(load)((const void *)(p))
#define loadu_si(p) SI(loadu)((const void *)(p))
#define store_si(p, x) SI(store)((void *)(p), x)
#define storeu_si(p, x) SI(storeu)((void *)(p), x)

/* The same for half as many bytes. */
#define half_loadu(p) HALF_SI(loadu)((const void *)(p))
#define half_and HALF_SI(and)
#define half_or HALF_SI(or)
#define half_set1_epi8(x) OF_HALF(set1_epi8)((char)(x))
#define half_sub_epi8 OF_HALF(sub_epi8)
#define half_slli_epi16 OF_HALF(slli_epi16)
#define half_srli_epi16 OF_HALF(srli_epi16)
#define half_unpacklo_epi8 OF_HALF(unpacklo_epi8)
#define half_unpackhi_epi8 OF_HALF(unpackhi_epi8)
#define half_unpacklo_epi16 OF_HALF(unpacklo_epi16)
#define half_unpackhi_epi16 OF_HALF(unpackhi_epi16)

/* Repeats 16 bytes in each 128 bits; load_repeated_bytes: the lower or the upper bytes of 16 words. */
#define load_repeated(p) repeated(_mm_loadu_si128((const __m128i *)(p)))
TARGET static inline ints load_repeated_bytes(const uint16_t *words, int upper) {
    __m128i a = _mm_loadu_si128((const __m128i *)words), b = _mm_loadu_si128((const __m128i *)words + 1);
    if (upper) return repeated(_mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8)));
    const __m128i low = _mm_set1_epi16(0xff);
    return repeated(_mm_packus_epi16(_mm_and_si128(a, low), _mm_and_si128(b, low)));
}

/* Transposes each block of 4 x 4 words that shares 128 bits: 128 bits number l of transposed[q] are word 4l + q of
 * w[0..3]. */
TARGET static inline void transpose_blocks(const ints *w, ints *transposed) {
    ints low01 = OF_WIDTH(unpacklo_epi32)(w[0], w[1]), high01 = OF_WIDTH(unpackhi_epi32)(w[0], w[1]);
    ints low23 = OF_WIDTH(unpacklo_epi32)(w[2], w[3]), high23 = OF_WIDTH(unpackhi_epi32)(w[2], w[3]);
    transposed[0] = OF_WIDTH(unpacklo_epi64)(low01, low23);
    transposed[1] = OF_WIDTH(unpackhi_epi64)(low01, low23);
    transposed[2] = OF_WIDTH(unpacklo_epi64)(high01, high23);
    transposed[3] = OF_WIDTH(unpackhi_epi64)(high01, high23);
}

/* Requests bytes that are needed soon, into the level 2 cache. */
#define fetch_to_l2(p) _mm_prefetch((const char *)(p), _MM_HINT_T1)

#endif
