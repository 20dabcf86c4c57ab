/* Products of rows of int8 weights with activations. Some rows at a time: their reads overlap. */
#include "bf16.h"
#include "rows_together.h"

/* Multiplies `rows` rows from `first` on with all m tokens. rows, m: constants. */
__attribute__((always_inline)) TARGET static inline void
multiply_int8_rows(int rows, int m, const kt_int8_row_products *job, int64_t first) {
    const int64_t k = job->k, groups = k / KTQ_ROW_MULTIPLE;
    const int8_t *codes = job->codes + first * k;
    const uint8_t *scales = job->scales + 2 * first * groups;
    floats sum[MOST_SUMS][SUM_VECTORS], scale[MOST_SUMS];
    for (int i = 0; i < rows * m; i++)
        for (int v = 0; v < SUM_VECTORS; v++) sum[i][v] = setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        for (int r = 0; r < rows; r++) scale[r] = set1_ps(kt_from_bf16(kt_load16(scales + 2 * (r * groups + g))));
        for (int v = 0; v < SUM_VECTORS; v++) {
            const int64_t column = g * KTQ_ROW_MULTIPLE + 2 * v * LANES;
            for (int r = 0; r < rows; r++) {
                const int8_t *place = codes + r * k + column;
                const ints numbers = load_epi8_epi16(place);
                fetch_to_l2(place + rows * k);
                for (int t = 0; t < m; t++) {
                    const ints pairs = madd_epi16(numbers, loadu_si(job->x + t * k + column));
                    sum[r * m + t][v] = fmadd_ps(cvtepi32_ps(pairs), scale[r], sum[r * m + t][v]);
                }
            }
        }
    }
    write_products(rows * m, sum, job->out + first * m);
}

TARGET void KERNEL_OF(int8_row_products)(const kt_int8_row_products *job) {
    MULTIPLY_ROWS(multiply_int8_rows);
}
