/* As many candidates at a time as have room in registers: a row of the matrix is read once for them. */
#include "nearest_code_template.h"

TARGET static inline __attribute__((always_inline)) void measure_forms(const kt_group_search *search, int precision,
                                                                       float *lanes, int8_t *codes) {
    enum { VECTORS = KT_SEARCHED_GROUP / LANES, LANE_VECTORS = KT_SUM_LANES / LANES, AT_ONCE = REGISTERS / 8 };
    const code_vectors range = load_code_range(&search->codes, precision);
    floats x[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        ints bits = slli_epi32(load_epu16_epi32(search->values + 2 * v * LANES), 16);
        x[v] = mul_ps(castsi_ps(bits), set1_ps(search->unit));
    }
    for (int i = 0; i < search->count; i += AT_ONCE) {
        _Alignas(64) float d[AT_ONCE][KT_SEARCHED_GROUP];
        floats y[AT_ONCE][VECTORS];
        for (int a = 0; a < AT_ONCE; a++, codes += KT_SEARCHED_GROUP)
            for (int v = 0; v < VECTORS; v++) {
                floats q = nearest_codes(mul_ps(x[v], set1_ps(search->reciprocals[i + a])), range);
                store_ps(d[a] + v * LANES, sub_ps(x[v], mul_ps(q, set1_ps(search->scales[i + a]))));
                store_epi32_epi8(codes + v * LANES, cvtps_epi32(q));
                y[a][v] = loadu_ps(search->weights + v * LANES);
            }
        for (int c = 0; c < KT_SEARCHED_GROUP; c++)
            for (int v = 0; v < VECTORS; v++) {
                const floats h = loadu_ps(search->moments + c * KT_SEARCHED_GROUP + v * LANES);
                for (int a = 0; a < AT_ONCE; a++) y[a][v] = fmadd_ps(set1_ps(d[a][c]), h, y[a][v]);
            }
        for (int a = 0; a < AT_ONCE; a++, lanes += KT_SUM_LANES)
            for (int l = 0; l < LANE_VECTORS; l++) {
                floats sum = setzero_ps();
                for (int v = l; v < VECTORS; v += LANE_VECTORS)
                    sum = fmadd_ps(load_ps(d[a] + v * LANES), y[a][v], sum);
                storeu_ps(lanes + l * LANES, sum);
            }
    }
}

TARGET void KERNEL_OF(group_forms)(const kt_group_search *search, float *lanes, int8_t *codes) {
    if (search->codes.precision) measure_forms(search, search->codes.precision, lanes, codes);
    else measure_forms(search, 0, lanes, codes);
}
