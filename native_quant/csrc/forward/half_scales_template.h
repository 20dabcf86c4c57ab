/* FP16 to float32, times bytes. */

TARGET void KERNEL_OF(half_scales)(const uint8_t *halves, const uint8_t *factors, int64_t groups, float *out) {
    if (factors)
        for (int r = 0; r < KT_PANEL_ROWS; r += LANES) {
            floats half = load_ph_ps(halves + 2 * r);
            for (int64_t i = r; i < groups * KT_PANEL_ROWS; i += KT_PANEL_ROWS)
                storeu_ps(out + i, mul_ps(half, cvtepi32_ps(load_epu8_epi32(factors + i))));
        }
    else
        for (int64_t i = 0; i < groups * KT_PANEL_ROWS; i += LANES) storeu_ps(out + i, load_ph_ps(halves + 2 * i));
}
