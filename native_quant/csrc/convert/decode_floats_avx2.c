/* AVX2: decode_floats_template.h. */
#include "e2m1.h"
#include "lookup_avx2.h"

TARGET static inline void decode_fp4(const uint8_t *codes, int64_t columns, floats scale, uint16_t *out) {
    /* The products of the positive values; the others are the same with the sign changed. */
    floats products = mul_ps(loadu_ps(kt_e2m1), scale);
    table16 table = load_table((const floats[]){products, products});
    table.high = _mm_xor_si128(table.high, _mm_set_epi64x((int64_t)0x8080808080808080, 0));
    for (; columns >= 32; columns -= 32, codes += 16, out += 32) look_up_pairs(table, codes, out);
    if (columns) {
        __m128i pairs = _mm_loadl_epi64((const __m128i *)codes), nibble = _mm_set1_epi8(15);
        __m128i even = half_and(pairs, nibble), odd = half_and(_mm_srli_epi16(pairs, 4), nibble);
        look_up(table, _mm_unpacklo_epi8(even, odd), out);
    }
}

#include "decode_floats_template.h"
