/* AVX-512: decode_codes_template.h. */
#include "lookup_avx512.h"

TARGET static inline ints load_int4(const uint8_t *codes) {
    ints words = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1),
                                          _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i *)codes)));
    const ints shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    return and_si(_mm512_srlv_epi32(words, shifts), set1_epi32(15));
}

#include "decode_codes_template.h"
