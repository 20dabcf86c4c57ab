/* The transpose of 16 x 16 words of 32 bits, which packing and transposing both come down to. */
#ifndef KT_WORDS_AVX512_H
#define KT_WORDS_AVX512_H

#include <immintrin.h>

#include "kernels.h"

/* out[i], word j = in[j], word i. Two rounds of interleaving 32- and 64-bit items turn each 4 x 4 block of words that
   shares a lane; two rounds of moving lanes bring those of one column together. */
KT_TARGET_AVX512 static inline void kt_transpose_words(const __m512i *in, __m512i *out) {
    __m512i turned[4][4]; /* [g][q]: in lane l, word 4l + q of in[4g..4g+3] */
    for (int g = 0; g < 4; g++) {
        const __m512i *w = in + 4 * g;
        __m512i low01 = _mm512_unpacklo_epi32(w[0], w[1]), high01 = _mm512_unpackhi_epi32(w[0], w[1]);
        __m512i low23 = _mm512_unpacklo_epi32(w[2], w[3]), high23 = _mm512_unpackhi_epi32(w[2], w[3]);
        turned[g][0] = _mm512_unpacklo_epi64(low01, low23);
        turned[g][1] = _mm512_unpackhi_epi64(low01, low23);
        turned[g][2] = _mm512_unpacklo_epi64(high01, high23);
        turned[g][3] = _mm512_unpackhi_epi64(high01, high23);
    }
    for (int q = 0; q < 4; q++) {
        __m512i a = turned[0][q], b = turned[1][q], c = turned[2][q], d = turned[3][q];
        __m512i ab02 = _mm512_shuffle_i32x4(a, b, 0x88),
                ab13 = _mm512_shuffle_i32x4(a, b, 0xdd); /* lanes 0 2, 1 3 of each */
        __m512i cd02 = _mm512_shuffle_i32x4(c, d, 0x88), cd13 = _mm512_shuffle_i32x4(c, d, 0xdd);
        out[q] = _mm512_shuffle_i32x4(ab02, cd02, 0x88);
        out[4 + q] = _mm512_shuffle_i32x4(ab13, cd13, 0x88);
        out[8 + q] = _mm512_shuffle_i32x4(ab02, cd02, 0xdd);
        out[12 + q] = _mm512_shuffle_i32x4(ab13, cd13, 0xdd);
    }
}

#endif
