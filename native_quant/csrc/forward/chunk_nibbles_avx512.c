/* AVX-512: chunk_nibbles_template.h. */
#include "vectors_avx512.h"

/* vpermw takes 5 bits of a word, of which the upper one belongs to the next code: the values stand there twice. */
typedef ints table;

TARGET static inline table load_table(const uint16_t *values) {
    return _mm512_broadcast_i64x4(half_loadu(values));
}

TARGET static inline ints look_up_values(table values, ints words) {
    return _mm512_permutexvar_epi16(words, values);
}

#include "chunk_nibbles_template.h"
