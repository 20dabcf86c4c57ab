/* Products of rows of BF16 weights with activations. Some rows at a time: their reads overlap. */
#include "bf16_template.h"
#include "rows_together.h"

/* Multiplies `rows` rows from `first` on with all m tokens. rows, m: constants. */
__attribute__((always_inline)) TARGET static inline void multiply_rows(int rows, int m, const kt_row_products *job,
                                                                       int64_t first) {
    const int64_t row_bytes = 2 * job->k;
    const uint8_t *weight = job->weight + first * row_bytes, *x = (const uint8_t *)job->x;
    floats sum[MOST_SUMS][SUM_VECTORS];
    for (int i = 0; i < rows * m; i++)
        for (int v = 0; v < SUM_VECTORS; v++) sum[i][v] = setzero_ps();
    for (int64_t at = 0; at < row_bytes; at += 4 * KT_SUM_LANES)
        for (int v = 0; v < SUM_VECTORS; v++) {
            const int64_t place = at + v * VECTOR_BYTES;
            floats even[KTQ_ROW_TOKENS], odd[KTQ_ROW_TOKENS];
            for (int t = 0; t < m; t++) {
                const ints pairs = loadu_si(x + t * row_bytes + place);
                even[t] = castsi_ps(slli_epi32(pairs, 16)), odd[t] = upper_half(pairs);
            }
            for (int r = 0; r < rows; r++) {
                const uint8_t *columns = weight + r * row_bytes + place;
                const ints pairs = loadu_si(columns);
                fetch_to_l2(columns + rows * row_bytes);
                const floats first_columns = castsi_ps(slli_epi32(pairs, 16)), second_columns = upper_half(pairs);
                for (int t = 0; t < m; t++) {
                    floats *lanes = &sum[r * m + t][v];
                    *lanes = fmadd_ps(first_columns, even[t], fmadd_ps(second_columns, odd[t], *lanes));
                }
            }
        }
    write_products(rows * m, sum, job->out + first * m);
}

TARGET void KERNEL_OF(row_products)(const kt_row_products *job) {
    MULTIPLY_ROWS(multiply_rows);
}
