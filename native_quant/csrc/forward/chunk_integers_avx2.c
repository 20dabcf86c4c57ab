/* AVX2: chunk_integers_template.h. */
#include "vectors_avx2.h"

#include "bf16_template.h"

typedef struct {
    ints used; /* bits */
    floats offset;
} table;

TARGET static inline table table_of(int bits) {
    return (table){set1_epi16(bits == 6 ? 63 : 31), set1_ps(bits == 6 ? 128 + 32 : 128)};
}

TARGET static inline ints values_of(table of, ints words) {
    return bf16_of_codes(and_si(words, of.used), of.offset);
}

#include "chunk_integers_template.h"
