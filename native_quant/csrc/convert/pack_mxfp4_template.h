/* LANES rows at a time, a vector for each pair of columns, so that a row is a word of 32 bits. The magnitudes a, by the
 * lower of the two exponents, are integers of 16 bits in 512ths. A file that includes this must define
 *
 *     load_value_table   returns a table of the values of the codes, in 512ths, times 1 or 2
 *     look_up_value      returns the values of 16-bit codes from such a table
 *     convert_exponents  converts the exponents of amax, in words, to the second argument of fixed_point
 *     fixed_point        returns the magnitudes a of a pair of columns, from their BF16 bits */
#include "bf16.h"
#include "pack_mxfp4.h"
#include "pack_template.h"

enum { PAIRS = KT_GROUP_COLUMNS / 2 };

/* 1024ths to the nearest integer, ties to even. */
TARGET static inline ints rounded(ints x) {
    ints odd = and_si(srli_epi16(x, 10), set1_epi16(1));
    return srli_epi16(add_epi16(add_epi16(x, set1_epi16(511)), odd), 10);
}

/* Returns 0 if these rows are not for vectors. */
TARGET static inline int pack_rows(const ints *pairs, uint8_t *codes, uint8_t *exponents) {
    ints largest = setzero_si();
    for (int p = 0; p < PAIRS; p++) largest = max_epu16(largest, and_si(pairs[p], set1_epi16(KT_BF16_MAGNITUDE)));
    ints amax = and_si(max_epu16(largest, srli_epi32(largest, 16)), set1_epi32(KT_BF16_MAGNITUDE));
    const ints least = set1_epi32(KT_MXFP4_NORMAL);
    mask zeros = eq_epi32(amax, setzero_si());
    ints exponent = where_epi32(zeros, least, srli_epi32(amax, 7));
    if (any_gt_epi32(least, exponent) || any_gt_epi32(exponent, set1_epi32(KT_MXFP4_HUGE - 1))) return 0;

    const ints values = load_value_table(1), doubled = load_value_table(2), unit = convert_exponents(exponent);
    ints small_error = setzero_si(), large_error = setzero_si(), small[4], large[4], signs[4];
    for (int v = 0; v < 4; v++) {
        small[v] = large[v] = signs[v] = setzero_si();
        for (int g = 0; g < 4; g++) {
            ints bits = pairs[4 * v + g], a = fixed_point(bits, unit), twice = slli_epi16(a, 1);
            /* The code of a is a rounding of 2a, 2 + a or 4 + a/2, whichever is least; by the higher exponent, of a or
               2 + a/2. */
            ints low = min_epu16(slli_epi16(a, 2), add_epi16(twice, set1_epi16(2048)));
            low = min_epu16(low, add_epi16(a, set1_epi16(4096)));
            low = rounded(min_epu16(low, set1_epi16(7 * 1024)));
            ints high = rounded(min_epu16(twice, add_epi16(a, set1_epi16(2048))));
            ints d = sub_epi16(a, look_up_value(low, values));
            small_error = add_epi32(small_error, madd_epi16(d, d));
            d = sub_epi16(a, look_up_value(high, doubled));
            large_error = add_epi32(large_error, madd_epi16(d, d));
            small[v] = or_si(small[v], slli_epi16(low, 4 * g));
            large[v] = or_si(large[v], slli_epi16(high, 4 * g));
            signs[v] = or_si(signs[v], srli_epi16(and_si(bits, set1_epi16(0x8000)), 12 - 4 * g));
        }
    }
    mask higher = gt_epi32(small_error, large_error);
    for (int v = 0; v < 4; v++) storeu_si(codes + 64 * v, or_si(where_epi32(higher, large[v], small[v]), signs[v]));
    ints e = sub_epi32(exponent, where_epi32(higher, set1_epi32(1), set1_epi32(2)));
    store_epi32_epi8(exponents, where_epi32(zeros, set1_epi32(KT_MXFP4_ZERO_EXPONENT), e));
    return 1;
}

TARGET int KERNEL_OF(pack_mxfp4)(const uint8_t *rows, int64_t row_stride, uint8_t *codes, uint8_t *exponents,
                                 const kt_prefetch *prefetch) {
    for (int first = 0; first < KT_HALF_ROWS; first += LANES) {
        ints in[LANES], pairs[PAIRS];
#pragma GCC unroll 2
        for (int p = 0; p < PAIRS; p += LANES) {
            for (int r = 0; r < LANES; r++) in[r] = loadu_si(rows + (first + r) * row_stride + 4 * p);
            transpose_words(in, pairs + p);
        }
        for (int r = first; r < first + LANES; r++) kt_prefetch_columns(prefetch, r, 0, KT_GROUP_COLUMNS);
        if (!pack_rows(pairs, codes + 4 * first, exponents + first))
            return kt_pack_mxfp4_scalar(rows, row_stride, codes, exponents, prefetch);
    }
    return 1;
}
