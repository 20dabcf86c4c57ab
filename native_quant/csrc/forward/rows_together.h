/* What the kernels of products of rows share: the blocks of rows for each number of tokens, and the end of a block. */
#ifndef KT_ROWS_TOGETHER_H
#define KT_ROWS_TOGETHER_H

enum { SUM_VECTORS = KT_SUM_LANES / LANES, MOST_SUMS = 8 }; /* MOST_SUMS: of rows times tokens in a block */

/* Writes the products of a block: the lanes of each sum, added up. count: a constant. */
__attribute__((always_inline)) TARGET static inline void write_products(int count, floats (*sum)[SUM_VECTORS],
                                                                        float *out) {
    for (int i = 0; i < count; i++) {
        float lanes[KT_SUM_LANES];
        for (int v = 0; v < SUM_VECTORS; v++) storeu_ps(lanes + v * LANES, sum[i][v]);
        out[i] = kt_add_lanes(lanes);
    }
}

/* Calls multiply(rows, tokens, job, first row) with constants until all rows of `job` are done. */
#define MULTIPLY_ALL(multiply, together, tokens)                                                       \
    do {                                                                                               \
        int64_t row = 0;                                                                               \
        for (; row + (together) <= job->rows; row += (together)) multiply(together, tokens, job, row); \
        for (; row < job->rows; row++) multiply(1, tokens, job, row);                                  \
    } while (0)

/* The same with as many rows together as the sums of job->m tokens leave registers for. */
#define MULTIPLY_ROWS(multiply)                                                \
    switch (job->m) {                                                          \
        case 1: MULTIPLY_ALL(multiply, 4, 1); break;                           \
        case 2: MULTIPLY_ALL(multiply, 2, 2); break;                           \
        case 3: MULTIPLY_ALL(multiply, REGISTERS / 16, 3); break;              \
        default: MULTIPLY_ALL(multiply, REGISTERS / 16, KTQ_ROW_TOKENS);       \
    }

#endif
