/* AVX-512: chunk_mxfp4_template.h. */
#include "vectors_avx512.h"

/* vpermw takes 5 bits of a word, of which the upper one belongs to the next code: the table stands there twice. */
TARGET static inline ints values_of(ints words) {
    const __m256i values = _mm256_setr_epi16(0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, (short)0x8000,
                                             (short)0xbf00, (short)0xbf80, (short)0xbfc0, (short)0xc000, (short)0xc040,
                                             (short)0xc080, (short)0xc0c0);
    return _mm512_permutexvar_epi16(words, _mm512_broadcast_i64x4(values));
}

#include "chunk_mxfp4_template.h"
