/* FP8 E4M3 to BF16. A file that includes this must include fp8_to_bf16.h or a header that replaces it. */

TARGET void KERNEL_OF(chunk_fp8)(const uint8_t *codes, int64_t columns, uint16_t *chunk) {
    for (int64_t i = 0; i < columns * KT_PANEL_ROWS; i += VECTOR_BYTES) {
        ints values[2];
        fetch(codes + KT_CHUNK_AHEAD + i / 2);
        fp8_to_bf16(codes + i, values);
        storeu_si(chunk + i, values[0]);
        storeu_si(chunk + i + VECTOR_BYTES / 2, values[1]);
    }
}
