/* MXFP4 to BF16: a vector of words of 4 codes at a time. A file that includes this must define values_of: what the
 * lowest codes of words stand for. */

TARGET int KERNEL_OF(chunk_mxfp4)(const uint8_t *codes, const uint8_t *scales, int64_t columns, uint16_t *chunk,
                                  float *scale) {
    for (int64_t i = 0; i < columns * KT_PANEL_ROWS; i += 128) {
        fetch(codes + KT_CHUNK_AHEAD + i / 4);
        for (int at = 0; at < 32; at += 2 * LANES) {
            ints words = loadu_si(codes + i / 2 + 2 * at);
            for (int g = 0; g < 4; g++, words = srli_epi16(words, 4))
                storeu_si(chunk + i + g * 32 + at, values_of(words));
        }
    }
    ints least = set1_epi32(1);
    for (int64_t i = 0; i < columns; i += LANES) {
        ints exponents = load_epu8_epi32(scales + i);
        least = min_epi32(least, exponents);
        storeu_si(scale + i, slli_epi32(exponents, 23));
    }
    return any_gt_epi32(set1_epi32(1), least) != 0;
}
