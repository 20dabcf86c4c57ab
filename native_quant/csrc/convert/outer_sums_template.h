/* The sums stay in registers; a row of the panel is read once for all vectors. */

TARGET void KERNEL_OF(outer_sums)(int64_t count, const float *vectors, const float *panel, float *sums) {
    enum { LANE_VECTORS = KT_SUM_LANES / LANES };
    floats sum[KT_TOGETHER * LANE_VECTORS];
    for (int i = 0; i < KT_TOGETHER * LANE_VECTORS; i++) sum[i] = loadu_ps(sums + i * LANES);
    for (int64_t i = 0; i < count; i++, vectors += KT_TOGETHER, panel += KT_SUM_LANES)
        for (int v = 0; v < KT_TOGETHER; v++) {
            const floats x = set1_ps(vectors[v]);
            for (int l = 0; l < LANE_VECTORS; l++)
                sum[v * LANE_VECTORS + l] = fmadd_ps(x, loadu_ps(panel + l * LANES), sum[v * LANE_VECTORS + l]);
        }
    for (int i = 0; i < KT_TOGETHER * LANE_VECTORS; i++) storeu_ps(sums + i * LANES, sum[i]);
}
