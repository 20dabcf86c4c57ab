/* Activations to int8, a vector of codes at a time. The second reading of the row comes from L1 or L2. */
#include "convert/pack_template.h"
#include "quantize_row.h"

TARGET static inline ints magnitude(const float *x) {
    return and_si(loadu_si(x), set1_epi32(0x7fffffff));
}

/* Without the sign, float32 bits order as the values do. */
TARGET static uint32_t amax_floats(const float *x, int64_t k) {
    ints a = magnitude(x), b = a, c = a, d = a;
    for (int64_t j = 0; j < k; j += 4 * LANES) {
        a = max_epu32(a, magnitude(x + j));
        b = max_epu32(b, magnitude(x + j + LANES));
        c = max_epu32(c, magnitude(x + j + 2 * LANES));
        d = max_epu32(d, magnitude(x + j + 3 * LANES));
    }
    return reduce_max_epu32(max_epu32(max_epu32(a, b), max_epu32(c, d)));
}

/* 4 * LANES codes in their order. */
TARGET static inline ints codes_of_bf16(const void *x, floats reciprocal) {
    return after_pack(kt_int8_codes(x, reciprocal));
}

TARGET static inline ints to_integers(const float *x, floats reciprocal) {
    return cvtps_epi32(mul_ps(loadu_ps(x), reciprocal)); /* to nearest even */
}

TARGET static inline ints codes_of_floats(const float *x, floats reciprocal) {
    ints low = packs_epi32(to_integers(x, reciprocal), to_integers(x + LANES, reciprocal));
    ints high = packs_epi32(to_integers(x + 2 * LANES, reciprocal), to_integers(x + 3 * LANES, reciprocal));
    return after_packs(packs_epi16(low, high));
}

/* Squares of codes in int32: their sum over 65536 columns fits. */
TARGET static inline ints squares(ints codes) {
    ints magnitude = abs_epi8(codes);
    return madd_epi16(maddubs_epi16(magnitude, magnitude), set1_epi16(1));
}

TARGET float KERNEL_OF(quantize_row)(int is_bf16, const void *x, int64_t k, int64_t copies, const kt_code_row *place,
                                     int32_t *sums, int64_t *energy) {
    float scale = kt_row_scale_int8(is_bf16 ? (uint32_t)KERNEL_OF(amax)(x, k) << 16 : amax_floats(x, k));
    if (!(scale > 0)) {
        kt_quantize_to_zero(k, copies, place, sums);
        *energy = 0;
        return scale;
    }
    const floats reciprocal = set1_ps(1.0f / scale);
    const ints ones8 = set1_epi8(1), ones16 = set1_epi16(1);
    ints all = setzero_si();
    for (int64_t first = 0; first < k; first += KT_K_BLOCK) {
        ints sum = setzero_si(); /* of pairs, in int16: KT_K_BLOCK / VECTOR_BYTES of them, each at most 254 */
        for (int64_t j = first; j < k && j < first + KT_K_BLOCK; j += VECTOR_BYTES) {
            ints codes = is_bf16 ? codes_of_bf16((const uint16_t *)x + j, reciprocal)
                                 : codes_of_floats((const float *)x + j, reciprocal);
            for (int64_t i = 0; i < copies; i++) storeu_si(place[i].q + j / 64 * place[i].pitch + j % 64, codes);
            all = add_epi32(all, squares(codes));
            sum = add_epi16(sum, maddubs_epi16(ones8, codes));
        }
        sums[first / KT_K_BLOCK] = reduce_add_epi32(madd_epi16(sum, ones16));
    }
    *energy = reduce_add_epi32(all);
    return scale;
}
