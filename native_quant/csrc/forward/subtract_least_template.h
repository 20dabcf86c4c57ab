/* The least values of groups times sums of activations, subtracted: a token's sums stay in registers. */

TARGET void KERNEL_OF(subtract_least)(int64_t m, int64_t groups, const float *least, const float *sums,
                                      int64_t sums_pitch, float *c) {
    enum { VECTORS = KT_PANEL_ROWS / LANES };
    for (int64_t t = 0; t < m; t++, c += KT_PANEL_ROWS, sums += sums_pitch) {
        floats total[VECTORS];
        for (int v = 0; v < VECTORS; v++) total[v] = load_ps(c + v * LANES);
        for (int64_t g = 0; g < groups; g++)
            for (int v = 0; v < VECTORS; v++)
                total[v] = fnmadd_ps(loadu_ps(least + g * KT_PANEL_ROWS + v * LANES), set1_ps(sums[g]), total[v]);
        for (int v = 0; v < VECTORS; v++) store_ps(c + v * LANES, total[v]);
    }
}
