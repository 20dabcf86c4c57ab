/* The KT_SUM_LANES lanes of a sum are one vector or several. Some candidates at a time, so that their sums stay in
 * registers; what the first ones computed of a row is read again from L1. A file that includes this must define
 *
 *     AT_ONCE    how many candidates at a time
 *     add_lanes  the sums of the lanes of 2 * AT_ONCE vectors, of which the first half are the products: upper halves
 *                are added to lower ones, of ever more vectors at once */

enum { VECTORS = KT_SUM_LANES / LANES };

/* |x| in steps of the largest candidate; a subnormal x counts as 0. */
TARGET static inline floats count_units(const uint8_t *values, floats reciprocal) {
    ints x = slli_epi32(and_si(load_epu16_epi32(values), set1_epi32(0x7fff)), 16);
    ints units = castps_si(mul_ps(castsi_ps(x), reciprocal));
    return castsi_ps(where_epi32(gt_epi32(x, set1_epi32(0x7fffff)), units, setzero_si()));
}

TARGET static inline __attribute__((always_inline)) void
measure_candidates(const kt_scale_search *search, int first, int weighted, float *products, float *squares) {
    const floats reciprocal = set1_ps(search->reciprocal), round = set1_ps(KT_ROUND);
    const floats most = set1_ps(search->largest + KT_ROUND);
    floats product[AT_ONCE * VECTORS], square[AT_ONCE * VECTORS], ratio[AT_ONCE], sums[2 * AT_ONCE];
    for (int i = 0; i < AT_ONCE; i++) ratio[i] = set1_ps(search->ratios[first + i]);
    for (int i = 0; i < AT_ONCE * VECTORS; i++) product[i] = square[i] = setzero_ps();
    for (int64_t c = 0; c < search->k; c += KT_SUM_LANES)
        for (int vector = 0; vector < VECTORS; vector++) {
            int64_t at = c + vector * LANES;
            floats u = first ? load_ps(search->units + at) : count_units(search->row + 2 * at, reciprocal);
            if (!first) store_ps(search->units + at, u);
            floats h = weighted ? loadu_ps(search->weights + at) : u;
            floats v = weighted ? mul_ps(h, u) : u;
            for (int i = 0; i < AT_ONCE; i++) {
                floats q = sub_ps(min_ps(fmadd_ps(u, ratio[i], round), most), round);
                int sum = i * VECTORS + vector;
                product[sum] = fmadd_ps(v, q, product[sum]);
                square[sum] = fmadd_ps(weighted ? mul_ps(h, q) : q, q, square[sum]);
            }
        }
    for (int i = 0; i < AT_ONCE; i++) {
        sums[i] = product[i * VECTORS];
        sums[AT_ONCE + i] = square[i * VECTORS];
        for (int v = 1; v < VECTORS; v++) {
            sums[i] = add_ps(sums[i], product[i * VECTORS + v]);
            sums[AT_ONCE + i] = add_ps(sums[AT_ONCE + i], square[i * VECTORS + v]);
        }
    }
    add_lanes(sums, products + first, squares + first);
}

TARGET void KERNEL_OF(scale_sums)(const kt_scale_search *search, float *products, float *squares) {
    if (search->weights) {
        measure_candidates(search, 0, 1, products, squares);
        for (int first = AT_ONCE; first < KT_CANDIDATES; first += AT_ONCE)
            measure_candidates(search, first, 1, products, squares);
    } else {
        measure_candidates(search, 0, 0, products, squares);
        for (int first = AT_ONCE; first < KT_CANDIDATES; first += AT_ONCE)
            measure_candidates(search, first, 0, products, squares);
    }
}
