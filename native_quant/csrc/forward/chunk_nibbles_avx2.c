/* AVX2: chunk_nibbles_template.h. */
#include "vectors_avx2.h"

/* vpshufb looks up the lower and the upper bytes of 16 values; where an index is 0, so is what it finds. */
typedef struct {
    ints lower, upper;
} table;

TARGET static inline table load_table(const uint16_t *values) {
    return (table){load_repeated_bytes(values, 0), load_repeated_bytes(values, 1)};
}

TARGET static inline ints look_up_values(table values, ints words) {
    ints code = and_si(words, set1_epi16(15));
    return or_si(shuffle_epi8(values.upper, slli_epi16(code, 8)), shuffle_epi8(values.lower, code));
}

#include "chunk_nibbles_template.h"
