/* A group is a few vectors, which stay in registers while the candidates are tried. */
#include "nearest_code_template.h"

TARGET static inline __attribute__((always_inline)) void measure_errors(const kt_group_search *search, int precision,
                                                                        float *lanes, int8_t *codes) {
    enum { VECTORS = KT_SEARCHED_GROUP / LANES, LANE_VECTORS = KT_SUM_LANES / LANES };
    const code_vectors range = load_code_range(&search->codes, precision);
    floats x[VECTORS], weights[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        ints bits = slli_epi32(load_epu16_epi32(search->values + 2 * v * LANES), 16);
        x[v] = mul_ps(castsi_ps(bits), set1_ps(search->unit));
        weights[v] = loadu_ps(search->weights + v * LANES);
    }
    for (int i = 0; i < search->count; i++, lanes += KT_SUM_LANES, codes += KT_SEARCHED_GROUP) {
        const floats scale = set1_ps(search->scales[i]), reciprocal = set1_ps(search->reciprocals[i]);
        floats sums[LANE_VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            floats q = nearest_codes(mul_ps(x[v], reciprocal), range), d = sub_ps(x[v], mul_ps(q, scale));
            floats before = v < LANE_VECTORS ? setzero_ps() : sums[v % LANE_VECTORS];
            sums[v % LANE_VECTORS] = fmadd_ps(mul_ps(weights[v], d), d, before);
            store_epi32_epi8(codes + v * LANES, cvtps_epi32(q));
        }
        for (int v = 0; v < LANE_VECTORS; v++) storeu_ps(lanes + v * LANES, sums[v]);
    }
}

TARGET void KERNEL_OF(group_errors)(const kt_group_search *search, float *lanes, int8_t *codes) {
    if (search->codes.precision) measure_errors(search, search->codes.precision, lanes, codes);
    else measure_errors(search, 0, lanes, codes);
}
