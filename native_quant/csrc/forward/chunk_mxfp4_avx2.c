/* AVX2: chunk_mxfp4_template.h. */
#include "vectors_avx2.h"

/* vpshufb looks up the lower and the upper bytes of 16 values; where an index is 0, so is what it finds. */
TARGET static inline ints values_of(ints words) {
    static const uint8_t lower[16] = {0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0, 0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0};
    static const uint8_t upper[16] = {0,    0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40,
                                      0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
    ints code = and_si(words, set1_epi16(15)), above = shuffle_epi8(load_repeated(upper), slli_epi16(code, 8));
    return or_si(above, shuffle_epi8(load_repeated(lower), code));
}

#include "chunk_mxfp4_template.h"
