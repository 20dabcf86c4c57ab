/* AVX-512: decode_floats_template.h. FP4 codes of a short group are looked up in the values of the codes. */
#include "e2m1.h"
#include "lookup_avx512.h"

TARGET static inline void decode_fp4(const uint8_t *codes, int64_t columns, floats scale, uint16_t *out) {
    const floats values = loadu_ps(kt_e2m1);
    if (columns >= 32) {
        floats products = mul_ps(values, scale);
        table16 table = load_table(&products);
        for (; columns >= 32; columns -= 32, codes += 16, out += 32) look_up_pairs(table, codes, out);
    }
    if (columns) { /* a byte to 64 bits; the lowest 4 of each half are the index */
        ints pairs = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)codes));
        ints index = or_si(pairs, _mm512_slli_epi64(pairs, 28));
        store_epi32_epi16(out, to_bf16(mul_ps(_mm512_permutexvar_ps(index, values), scale)));
    }
}

#include "decode_floats_template.h"
