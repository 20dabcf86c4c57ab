/* FP8 E4M3 to BF16, a vector of codes at a time: sign, exponent and fraction as they are, another bias. Codes for which
 * that is wrong are rare. */

/* The values of codes with their sign extended, */
TARGET static inline ints normal_to_bf16(ints code) {
    ints fields = and_si(slli_epi16(code, 4), set1_epi16(0x87f0));
    return add_epi16(fields, set1_epi16(0x3c00));
}

/* and where some are subnormal or 0: m * 2^-9, the upper and the lower byte. Where shuffle_epi8's index is 0, so is
   what it finds. */
TARGET static inline ints any_to_bf16(ints code, ints normal) {
    static const uint8_t lower[16] = {0, 0, 0x80, 0xc0, 0, 0x20, 0x40, 0x60};
    static const uint8_t upper[16] = {0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c};
    ints fraction = and_si(code, set1_epi16(7)), above = slli_epi16(fraction, 8);
    ints value = or_si(shuffle_epi8(load_repeated(lower), fraction), shuffle_epi8(load_repeated(upper), above));
    value = or_si(value, and_si(code, set1_epi16(0x8000)));
    return where_epi16(eq_epi16(and_si(code, set1_epi16(0x78)), setzero_si()), value, normal);
}

TARGET void KERNEL_OF(chunk_fp8)(const uint8_t *codes, int64_t columns, uint16_t *chunk) {
    int has_nan = 0;
    for (int64_t i = 0; i < columns * KT_PANEL_ROWS; i += VECTOR_BYTES) {
        fetch(codes + KT_CHUNK_AHEAD + i / 2);
        ints magnitude = and_si(loadu_si(codes + i), set1_epi8(0x7f));
        ints first = load_epi8_epi16(codes + i), second = load_epi8_epi16(codes + i + VECTOR_BYTES / 2);
        ints low = normal_to_bf16(first), high = normal_to_bf16(second);
        /* Magnitudes of normal numbers are 8 .. 126. */
        if (any_gt_epu8(sub_epi8(magnitude, set1_epi8(8)), set1_epi8(118))) {
            has_nan |= any_gt_epu8(magnitude, set1_epi8(0x7e));
            low = any_to_bf16(first, low);
            high = any_to_bf16(second, high);
        }
        storeu_si(chunk + i, low);
        storeu_si(chunk + i + VECTOR_BYTES / 2, high);
    }
    if (has_nan) kt_chunk_fp8_scalar(codes, columns, chunk);
}
