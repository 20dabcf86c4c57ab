/* AVX-512: chunk_integers_template.h. */
#include "vectors_avx512.h"

#include "bf16_template.h"

/* vpermi2w takes 6 bits of a word; of 5 bits, the values stand there twice. */
typedef struct {
    ints low, high;
} table;

TARGET static inline table table_of(int bits) {
    static const uint8_t codes[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                      16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
    ints first = load_epu8_epi16(codes), second = bits == 6 ? add_epi16(first, set1_epi16(32)) : first;
    floats offset = set1_ps(bits == 6 ? 128 + 32 : 128);
    return (table){bf16_of_codes(first, offset), bf16_of_codes(second, offset)};
}

TARGET static inline ints values_of(table of, ints words) {
    return _mm512_permutex2var_epi16(of.low, words, of.high);
}

#include "chunk_integers_template.h"
