/* The weighted sum of a token's experts: a block of columns stays in registers over all of them. */

/* `vectors` vectors of columns from `c` on. vectors: a constant. */
__attribute__((always_inline)) TARGET static inline void
combine_block(int vectors, int64_t terms, const float *const *rows, const float *weights, int64_t c, float *out) {
    floats sum[REGISTERS / 2];
    for (int i = 0; i < vectors; i++) sum[i] = setzero_ps();
    for (int64_t t = 0; t < terms; t++) {
        const floats weight = set1_ps(weights[t]);
        for (int i = 0; i < vectors; i++) sum[i] = fmadd_ps(loadu_ps(rows[t] + c + i * LANES), weight, sum[i]);
    }
    for (int i = 0; i < vectors; i++) storeu_ps(out + c + i * LANES, sum[i]);
}

TARGET void KERNEL_OF(combine)(int64_t terms, const float *const *rows, const float *weights, int64_t columns,
                               float *out) {
    enum { MOST = REGISTERS / 2 * LANES, LEAST = 32 };
    int64_t c = 0;
    for (; c + MOST <= columns; c += MOST) combine_block(MOST / LANES, terms, rows, weights, c, out);
    for (; c < columns; c += LEAST) combine_block(LEAST / LANES, terms, rows, weights, c, out);
}
