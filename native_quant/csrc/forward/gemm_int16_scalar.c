/* Products of int16 as they are defined (numerics.md, section 5b). */
#include <math.h>

#include "gemm_int16.h"

/* KT_SUM_COLUMNS activations as integers, of 8 bits if int8 is 1; returns their unit. */
static float round_to_units(int int8, const uint16_t *a, int32_t *out) {
    uint32_t most = 0;
    for (int j = 0; j < KT_SUM_COLUMNS; j++) {
        uint32_t magnitude = a[j] & KT_BF16_MAGNITUDE;
        if (magnitude > most) most = magnitude;
    }
    float unit = int8 ? kt_int8_unit(most) : kt_int16_unit(most);
    float reciprocal = int8 ? kt_int8_reciprocal(unit) : kt_int16_reciprocal(unit);
    for (int j = 0; j < KT_SUM_COLUMNS; j++) out[j] = reciprocal ? (int32_t)lrintf(kt_from_bf16(a[j]) * reciprocal) : 0;
    return unit;
}

void kt_sum_units_scalar(int64_t columns, const uint16_t *a, float *sums) {
    int32_t units[KT_SUM_COLUMNS];
    for (int64_t j = 0; j < columns; j += KT_SUM_COLUMNS) {
        const float unit = round_to_units(1, a + j, units);
        int32_t sum = 0;
        for (int i = 0; i < KT_SUM_COLUMNS; i++) sum += units[i];
        sums[j / KT_SUM_COLUMNS] = (float)sum * unit;
    }
}

/* The sum of a token's products with row r of a chunk of KT_SUM_COLUMNS columns. */
static int32_t sum_of_products(const int32_t *a, const int16_t *chunk, int64_t r) {
    const int16_t *row = chunk + r / KT_HALF_ROWS * (KT_HALF_BYTES / 2) + r % KT_HALF_ROWS * 2;
    int32_t sum = 0;
    for (int64_t j = 0; j < KT_SUM_COLUMNS; j++) sum += a[j] * row[j / 2 * 32 + j % 2];
    return sum;
}

void kt_gemm_int16_scalar(const kt_bf16_gemm *job) {
    float scale[KTQ_K_COLUMNS];
    int32_t a[KT_SUM_COLUMNS];
    for (int64_t s = 0; s < job->panels; s++) {
        float *c = job->c + s * job->c_pitch;
        kt_clear_bf16_sums(job, s);
        for (int64_t first = 0; first < job->k; first += KT_SUM_COLUMNS) {
            const kt_bf16_panel *panel = &job->panel[s];
            if (panel->least && first % KTQ_K_COLUMNS == 0) kt_subtract_least(job, s, first, 0, job->m, scale);
            panel->integers->chunk(job->kernels, panel, first, KT_SUM_COLUMNS, (uint16_t *)job->scratch);
            panel->scale(job->kernels, panel, first, KT_SUM_COLUMNS, scale);
            for (int64_t t = 0; t < job->m; t++) {
                float unit = round_to_units(kt_has_int8(job), job->a + t * job->a_pitch + first, a);
                for (int64_t r = 0; r < KT_PANEL_ROWS; r++) {
                    float sum = (float)sum_of_products(a, (const int16_t *)job->scratch, r) * unit;
                    c[t * KT_PANEL_ROWS + r] = fmaf(scale[r], sum, c[t * KT_PANEL_ROWS + r]);
                }
            }
        }
    }
}
