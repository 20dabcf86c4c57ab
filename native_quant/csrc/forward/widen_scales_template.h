/* Scales to float32: a vector of them at a time. */

TARGET void KERNEL_OF(widen_scales)(int kind, const uint8_t *scales, int64_t count, float *out) {
    if (kind == KT_BF16_SCALES)
        for (int64_t i = 0; i < count; i += LANES) storeu_si(out + i, slli_epi32(load_epu16_epi32(scales + 2 * i), 16));
    else {
        const floats factor = set1_ps(kind == KT_HALF_E8M0_SCALES ? 0.5f : 1.0f);
        for (int64_t i = 0; i < count; i += LANES)
            storeu_ps(out + i, mul_ps(castsi_ps(slli_epi32(load_epu8_epi32(scales + i), 23)), factor));
    }
}
