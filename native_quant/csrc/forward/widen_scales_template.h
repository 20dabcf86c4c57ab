/* Scales to float32: a vector of them at a time. */

TARGET void KERNEL_OF(widen_scales)(int bytes, const uint8_t *scales, int64_t count, float *out) {
    if (bytes == 1)
        for (int64_t i = 0; i < count; i += LANES) storeu_si(out + i, slli_epi32(load_epu8_epi32(scales + i), 23));
    else
        for (int64_t i = 0; i < count; i += LANES) storeu_si(out + i, slli_epi32(load_epu16_epi32(scales + 2 * i), 16));
}
