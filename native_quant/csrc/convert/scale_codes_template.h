/* Two vectors of float32 at a time. */

/* Codes without their signs, in 32-bit lanes. */
TARGET static inline ints code_magnitudes(const float *units, floats ratio, floats most) {
    floats q = min_ps(fmadd_ps(load_ps(units), ratio, set1_ps(KT_ROUND)), most);
    return and_si(castps_si(q), set1_epi32(0xff)); /* the low bits are the integer */
}

TARGET void KERNEL_OF(scale_codes)(const kt_scale_search *search, float ratio, int8_t *codes) {
    const floats scale = set1_ps(ratio), most = set1_ps(search->largest + KT_ROUND);
    for (int64_t c = 0; c < search->k; c += 2 * LANES) {
        ints first = code_magnitudes(search->units + c, scale, most);
        ints second = code_magnitudes(search->units + c + LANES, scale, most);
        ints negative = srai_epi16(loadu_si(search->row + 2 * c), 15); /* all bits, or none */
        ints words = xor_si(after_pack(packus_epi32(first, second)), negative);
        store_epi16_epi8(codes + c, sub_epi16(words, negative));
    }
}
