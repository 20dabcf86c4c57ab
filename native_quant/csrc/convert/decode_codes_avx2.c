/* AVX2: decode_codes_template.h. */
#include <string.h>

#include "lookup_avx2.h"

TARGET static inline ints load_int4(const uint8_t *codes) {
    int word;
    memcpy(&word, codes, sizeof word);
    ints shifted = _mm256_srlv_epi32(set1_epi32(word), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    return and_si(shifted, set1_epi32(15));
}

#include "decode_codes_template.h"
