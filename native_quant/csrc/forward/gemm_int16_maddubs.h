/* The products of gemm_int16_template.h and gemm_int16_few_template.h without VNNI: vpmaddubsw adds two products of
 * bytes to an int16. A byte of an activation is -128 to 127, so that int16 holds the sums of 8 quads of codes up to 15,
 * 4 up to 31 or 2 up to 63. To widen these sums takes as long for each token as to multiply it, and to widen codes
 * takes as long for any number of tokens. */
#define PART_LINES(bits) (4 >> ((bits)-4))
#define WIDE(tokens) ((tokens) >= 3)

TARGET static inline ints add_products(ints sum, ints weights, ints a) {
    sum = add_epi32(sum, madd_epi16(weights, a));
    KEEP_IN_REGISTER(sum);
    return sum;
}

TARGET static inline ints add_quads(ints part, ints weights, ints a) {
    part = add_epi16(part, maddubs_epi16(weights, a));
    KEEP_IN_REGISTER(part);
    return part;
}

TARGET static inline ints add_widened(ints sum, ints part, int h) {
    sum = add_epi32(sum, madd_epi16(part, set1_epi16(h ? 128 : 1)));
    KEEP_IN_REGISTER(sum);
    return sum;
}
