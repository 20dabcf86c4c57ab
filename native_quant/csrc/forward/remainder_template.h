/* The remainder of coarse int8 codes, a vector of columns at a time. */

TARGET void KERNEL_OF(remainder)(const float *x, int64_t k, float scale, float step, kt_code_row q, int8_t *q2,
                                 int32_t *sums) {
    const floats coarse = set1_ps(scale), reciprocal = set1_ps(1.0f / step);
    for (int64_t first = 0; first < k; first += KT_K_BLOCK) {
        ints sum = setzero_si();
        for (int64_t j = first; j < k && j < first + KT_K_BLOCK; j += LANES) {
            int64_t at = j / 64 * q.pitch + j % 64;
            floats remainder = fnmadd_ps(cvtepi32_ps(load_epi8_epi32(q.q + at)), coarse, loadu_ps(x + j));
            ints codes = cvtps_epi32(mul_ps(remainder, reciprocal));
            store_epi32_epi8(q2 + at, codes);
            sum = add_epi32(sum, codes);
        }
        sums[first / KT_K_BLOCK] = reduce_add_epi32(sum);
    }
}
