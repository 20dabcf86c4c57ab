/* Products of BF16 as they are defined (numerics.md, section 5b). */
#include <math.h>

#include "bf16.h"
#include "gemm_bf16_steps.h"
#include "kernels.h"

/* The sum of a token's products with row r of a chunk of KT_SUM_COLUMNS columns: pair after pair, each from behind, as
 * vdpbf16ps does. */
static float sum_of_products(const uint16_t *a, const uint8_t *chunk, int64_t r) {
    const uint8_t *row = chunk + r / KT_HALF_ROWS * KT_HALF_BYTES + r % KT_HALF_ROWS * 4;
    float sum = 0;
    for (int64_t j = 0; j < KT_SUM_COLUMNS; j += 2) {
        const uint8_t *pair = row + j / 2 * 64;
        sum = fmaf(kt_from_bf16(a[j + 1]), kt_from_bf16(kt_load16(pair + 2)), sum);
        sum = fmaf(kt_from_bf16(a[j]), kt_from_bf16(kt_load16(pair)), sum);
    }
    return sum;
}

/* Adds the products of KT_SUM_COLUMNS columns from `first` on with a panel, whose sums are c. */
static void add_products(const kt_bf16_gemm *job, int64_t first, const uint8_t *chunk, const float *scale, float *c) {
    for (int64_t t = 0; t < job->m; t++)
        for (int64_t r = 0; r < KT_PANEL_ROWS; r++) {
            float *sum = &c[t * KT_PANEL_ROWS + r];
            *sum = fmaf(scale[r], sum_of_products(job->a + t * job->a_pitch + first, chunk, r), *sum);
        }
}

void kt_gemm_bf16_scalar(const kt_bf16_gemm *job) {
    float scale[KT_CHUNK_COLUMNS];
    for (int64_t s = 0; s < job->panels; s++) {
        const kt_bf16_panel *panel = &job->panel[s];
        const int64_t at_once = panel->least ? KTQ_K_COLUMNS : kt_chunk_columns(panel);
        for (int64_t i = 0; i < KT_CHUNK_COLUMNS; i++) scale[i] = 1;
        kt_clear_bf16_sums(job, s);
        for (int64_t first = 0, columns; first < job->k; first += columns) {
            columns = job->k - first < at_once ? job->k - first : at_once;
            if (panel->least) kt_subtract_least(job, s, first, 0, job->m, scale);
            const uint8_t *chunk = panel->codes + first * KT_PANEL_ROWS * 2;
            if (panel->chunk) {
                panel->chunk(job->kernels, panel, first, columns, (uint16_t *)job->scratch);
                chunk = job->scratch;
            }
            if (panel->scale) panel->scale(job->kernels, panel, first, columns, scale);
            const int64_t bytes = KT_SUM_COLUMNS * KT_PANEL_ROWS * 2;
            for (int64_t i = 0; i < panel->terms * columns; i += KT_SUM_COLUMNS, chunk += bytes)
                add_products(job, first + i % columns, chunk, scale + i % columns, job->c + s * job->c_pitch);
        }
    }
}
