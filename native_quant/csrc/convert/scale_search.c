/* The loop: rows are measured, searched and rounded one by one. Knows what is compared, but no instruction set. */
#include <string.h>

#include "kernels.h"
#include "quantize_scalar.h"

/* The candidates: the step that gives the largest value the largest code, divided by each of these. */
static const float ratios_of_int4[KT_CANDIDATES] = {1.0f, 1.125f, 1.25f, 1.375f, 1.5f, 1.625f, 1.75f, 2.0f,
                                                    2.25f, 2.5f, 2.75f, 3.0f, 3.5f, 4.0f, 5.0f, 6.0f};
static const float ratios_of_int8[KT_CANDIDATES] = {1.0f,    1.03125f, 1.0625f, 1.09375f, 1.125f,  1.15625f,
                                                    1.1875f, 1.21875f, 1.25f,   1.28125f, 1.3125f, 1.34375f,
                                                    1.375f,  1.40625f, 1.4375f, 1.46875f};

/* The candidate of least squared error and its factor; 0 if no candidate explains anything. */
static float least_squares(const kt_kernels *kernels, const kt_scale_search *search, int *best) {
    float products[KT_CANDIDATES], squares[KT_CANDIDATES], found = 0.0f, most = 0.0f;
    kernels->scale_sums(search, products, squares);
    *best = 0;
    for (int i = 0; i < KT_CANDIDATES; i++) {
        float factor = squares[i] != 0.0f ? products[i] / squares[i] : 0.0f, explained = products[i] * factor;
        if (!(explained > most)) continue;
        *best = i;
        most = explained;
        found = factor;
    }
    return found;
}

/* importance / its largest value; NULL if that is 0. */
static const float *weights_of(const float *importance, int64_t k, float *weights) {
    float largest = 0.0f;
    for (int64_t c = 0; importance && c < k; c++) largest = importance[c] > largest ? importance[c] : largest;
    if (largest == 0.0f) return NULL;
    for (int64_t c = 0; c < k; c++) weights[c] = importance[c] / largest;
    return weights;
}

int ktq_search_scales(int bits, int64_t n, int64_t k, const uint8_t *rows, int64_t row_stride, const float *importance,
                      float *scratch, int8_t *codes, float *scale, int64_t *bad_row) {
    if ((bits != 4 && bits != 8) || n < 1 || k < 64 || k % 64) return KTQ_EINVAL;
    if (!rows || !scratch || !codes || !scale || !bad_row) return KTQ_EINVAL;

    const kt_kernels *kernels = kt_current();
    kt_fp_state state = kt_enter();
    const float *weights = weights_of(importance, k, scratch + k);
    const float limit = kt_row_scale(bits, KT_BF16_INFINITY - 1), unit = bits == 8 ? 1.0f : 0x1p-4f;
    kt_scale_search search = {.k = k, .largest = (float)kt_largest_code(bits), .units = scratch};
    search.ratios = bits == 8 ? ratios_of_int8 : ratios_of_int4;
    *bad_row = -1;
    for (int64_t r = 0; r < n; r++, codes += k) {
        search.row = rows + r * row_stride;
        uint16_t amax = kernels->amax(search.row, k);
        if (amax >= KT_BF16_INFINITY) {
            *bad_row = r;
            break;
        }
        float absmax = kt_row_scale(bits, amax), found = 0.0f;
        int best = 0;
        if (absmax != 0.0f) {
            search.reciprocal = 1.0f / absmax * unit;
            search.weights = weights;
            float factor = least_squares(kernels, &search, &best);
            if (factor == 0.0f && weights) { /* nothing that has codes has weight */
                search.weights = NULL;
                factor = least_squares(kernels, &search, &best);
            }
            found = absmax * factor < limit ? absmax * factor : limit;
        }
        if (found < KT_SMALLEST_NORMAL) {
            scale[r] = 0.0f;
            memset(codes, 0, (size_t)k);
        } else {
            scale[r] = found;
            kernels->scale_codes(&search, search.ratios[best], codes);
        }
    }
    kt_leave(state);
    return *bad_row < 0 ? KTQ_OK : KTQ_ENONFINITE;
}
