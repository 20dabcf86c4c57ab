/* As many columns at a time as fill half of the registers: enough that no sum waits for itself. */
TARGET void KERNEL_OF(slice_products)(int64_t count, const float *slice, const float *from, float *to) {
    enum { VECTORS = KT_PANEL_ROWS / LANES, AT_ONCE = REGISTERS / 2 / VECTORS };
    for (int c = 0; c < KTQ_SLICE_COLUMNS; c += AT_ONCE, to += AT_ONCE * KT_PANEL_ROWS) {
        floats results[AT_ONCE * VECTORS];
        for (int i = 0; i < AT_ONCE * VECTORS; i++) results[i] = load_ps(to + i * LANES);
        for (int64_t i = 0; i < count; i++) {
            floats x[VECTORS];
            for (int v = 0; v < VECTORS; v++) x[v] = load_ps(from + i * KT_PANEL_ROWS + v * LANES);
            for (int a = 0; a < AT_ONCE; a++) {
                const floats factor = set1_ps(slice[i * KTQ_SLICE_COLUMNS + c + a]);
                floats *sums = results + a * VECTORS;
                for (int v = 0; v < VECTORS; v++) sums[v] = fnmadd_ps(x[v], factor, sums[v]);
            }
        }
        for (int i = 0; i < AT_ONCE * VECTORS; i++) store_ps(to + i * LANES, results[i]);
    }
}
