/* Codes of 4 bits to numbers of 16 bits: a vector of words of 4 codes at a time. A file that includes this must define
 * `table`, load_table, which makes one of 16 values, and look_up_values: what the lowest codes of words stand for. */

TARGET void KERNEL_OF(chunk_nibbles)(const uint16_t *values, const uint8_t *codes, int64_t columns, uint16_t *chunk) {
    const table codes_table = load_table(values);
    for (int64_t i = 0; i < columns * KT_PANEL_ROWS; i += 128) {
        fetch(codes + KT_CHUNK_AHEAD + i / 4);
        for (int at = 0; at < 32; at += 2 * LANES) {
            ints words = loadu_si(codes + i / 2 + 2 * at);
            for (int g = 0; g < 4; g++, words = srli_epi16(words, 4))
                storeu_si(chunk + i + g * 32 + at, look_up_values(codes_table, words));
        }
    }
}
