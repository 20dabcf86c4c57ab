/* Search of row scales: a loop that measures, searches and rounds row by row, without instruction sets. */
#include <string.h>

#include "kernels.h"
#include "quantize_scalar.h"

/* The candidates: the step that gives the largest value the largest code, divided by each of these. */
static const float int4_ratios[KT_CANDIDATES] = {1.0f,  1.125f, 1.25f, 1.375f, 1.5f, 1.625f, 1.75f, 2.0f,
                                                 2.25f, 2.5f,   2.75f, 3.0f,   3.5f, 4.0f,   5.0f,  6.0f};
static const float int8_ratios[KT_CANDIDATES] = {1.0f,    1.03125f, 1.0625f, 1.09375f, 1.125f,  1.15625f,
                                                 1.1875f, 1.21875f, 1.25f,   1.28125f, 1.3125f, 1.34375f,
                                                 1.375f,  1.40625f, 1.4375f, 1.46875f};

enum { TRIED = KT_TOGETHER - 1, ROWS = KT_SEARCHED_ROWS, DEPTH = KT_SEARCHED_DEPTH };

/* Finds the TRIED candidates of least squared error, best first. Returns the factor of the best one; 0 if no candidate
   reduces the error. */
static float least_squares(const kt_kernels *kernels, const kt_scale_search *search, int *tried) {
    float products[KT_CANDIDATES], squares[KT_CANDIDATES], factors[KT_CANDIDATES], explained[KT_CANDIDATES];
    kernels->scale_sums(search, products, squares);
    for (int i = 0; i < KT_CANDIDATES; i++) {
        factors[i] = squares[i] != 0.0f ? products[i] / squares[i] : 0.0f;
        explained[i] = products[i] * factors[i];
    }
    for (int t = 0; t < TRIED; t++) {
        tried[t] = 0;
        for (int i = 1; i < KT_CANDIDATES; i++)
            if (explained[i] > explained[tried[t]]) tried[t] = i;
        if (t == 0 && !(explained[tried[0]] > 0.0f)) factors[tried[0]] = 0.0f;
        explained[tried[t]] = -1.0f;
    }
    return factors[tried[0]];
}

/* A row. is_compared: whether its candidates are compared in the metric of second moments. */
typedef struct {
    int is_compared;
    float absmax;
} measured;

/* Writes the row's values, in steps, beside the codes of the candidates: vectors[k][KT_TOGETHER]. */
static void store_candidates(const kt_kernels *kernels, const kt_scale_search *search, const int *tried, int8_t *codes,
                             float *vectors) {
    for (int64_t c = 0; c < search->k; c++)
        vectors[c * KT_TOGETHER] = kt_load16(search->row + 2 * c) & KT_BF16_SIGN ? -search->units[c] : search->units[c];
    for (int t = 0; t < TRIED; t++) {
        kernels->scale_codes(search, search->ratios[tried[t]], codes);
        for (int64_t c = 0; c < search->k; c++) vectors[c * KT_TOGETHER + 1 + t] = codes[c];
    }
}

/* Computes for each row, in the metric, twice the products of its values and codes, and the squares of its codes. */
static void measure_tried(const kt_kernels *kernels, const kt_moments *moments, int64_t k, int rows,
                          const float *vectors, float products[][TRIED], float squares[][TRIED]) {
    _Alignas(64) float panel[DEPTH * KT_SUM_LANES], sums[ROWS][KT_TOGETHER][KT_SUM_LANES];
    float lanes[ROWS][TRIED][2][KT_SUM_LANES] = {0};
    for (int64_t column = 0; column < k; column += KT_SUM_LANES) {
        memset(sums, 0, sizeof sums);
        for (int64_t first = 0, end = column + KT_SUM_LANES; first < end; first += DEPTH) {
            int64_t count = end - first < DEPTH ? end - first : DEPTH;
            kt_copy_moments(moments, first, count, column, KT_SUM_LANES, panel);
            for (int r = 0; r < rows; r++)
                kernels->outer_sums(count, vectors + (r * k + first) * KT_TOGETHER, panel, sums[r][0]);
        }
        for (int r = 0; r < rows; r++)
            for (int t = 0; t < TRIED; t++)
                for (int l = 0; l < KT_SUM_LANES; l++) {
                    const float *v = vectors + (r * k + column + l) * KT_TOGETHER;
                    lanes[r][t][0][l] += v[1 + t] * sums[r][0][l] + v[0] * sums[r][1 + t][l];
                    lanes[r][t][1][l] += v[1 + t] * sums[r][1 + t][l];
                }
    }
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < TRIED; t++) {
            products[r][t] = kt_add_lanes(lanes[r][t][0]);
            squares[r][t] = kt_add_lanes(lanes[r][t][1]);
        }
}

static float minimum(float a, float b) {
    return a < b ? a : b;
}

/* Chooses codes and scales of rows again: the tried candidate with the least error in the metric. Keeps them if no
   candidate reduces the error. */
static void choose_again(const kt_kernels *kernels, const kt_moments *moments, int64_t k, float limit, int rows,
                         const measured *row, const float *vectors, int8_t *codes, float *scale) {
    float products[ROWS][TRIED], squares[ROWS][TRIED];
    measure_tried(kernels, moments, k, rows, vectors, products, squares);
    for (int r = 0; r < rows; r++) {
        float chosen = 0.0f, most = 0.0f;
        int best = 0;
        for (int t = 0; t < TRIED && row[r].is_compared; t++) {
            float product = 0.5f * products[r][t], factor = squares[r][t] > 0.0f ? product / squares[r][t] : 0.0f;
            if (!(product > 0.0f) || !(product * factor > most)) continue;
            best = t;
            most = product * factor;
            chosen = factor;
        }
        chosen = minimum(row[r].absmax * chosen, limit);
        if (chosen < KT_SMALLEST_NORMAL) continue;
        scale[r] = chosen;
        for (int64_t c = 0; c < k; c++) codes[r * k + c] = (int8_t)vectors[(r * k + c) * KT_TOGETHER + 1 + best];
    }
}

/* Returns importance divided by its largest value; NULL if that is 0. */
static const float *normalize_importance(const float *importance, int64_t k, float *weights) {
    float largest = 0.0f;
    for (int64_t c = 0; importance && c < k; c++) largest = importance[c] > largest ? importance[c] : largest;
    if (largest == 0.0f) return NULL;
    for (int64_t c = 0; c < k; c++) weights[c] = importance[c] / largest;
    return weights;
}

int ktq_search_scales(int bits, int64_t n, int64_t k, const uint8_t *rows, int64_t row_stride, const float *importance,
                      const float *moments, int64_t moments_stride, float *scratch, float *vectors, int8_t *codes,
                      float *scale, int64_t *bad_row) {
    if ((bits != 4 && bits != 8) || n < 1 || k < 64 || k % 64) return KTQ_EINVAL;
    if (!rows || !scratch || !codes || !scale || !bad_row || (moments && !vectors)) return KTQ_EINVAL;

    const kt_kernels *kernels = kt_current();
    kt_fp_state state = kt_enter();
    const float *weights = normalize_importance(importance, k, scratch + k);
    const kt_moments metric = moments ? kt_make_moments(moments, moments_stride, k) : (kt_moments){0};
    measured block[ROWS];
    const float limit = kt_row_scale(bits, KT_BF16_INFINITY - 1), unit = bits == 8 ? 1.0f : 0x1p-4f;
    kt_scale_search search = {.k = k, .largest = (float)kt_largest_code(bits), .units = scratch};
    search.ratios = bits == 8 ? int8_ratios : int4_ratios;
    *bad_row = -1;
    for (int64_t r = 0; r < n; r++, codes += k) {
        search.row = rows + r * row_stride;
        uint16_t amax = kernels->amax(search.row, k);
        if (amax >= KT_BF16_INFINITY) {
            *bad_row = r;
            break;
        }
        float absmax = kt_row_scale(bits, amax), chosen = 0.0f;
        int tried[TRIED] = {0}, in_block = (int)(r % ROWS);
        block[in_block] = (measured){0, absmax};
        if (absmax != 0.0f) {
            search.reciprocal = 1.0f / absmax * unit;
            search.weights = weights;
            float factor = least_squares(kernels, &search, tried);
            if (factor == 0.0f && weights) { /* all values with codes have weight 0 */
                search.weights = NULL;
                factor = least_squares(kernels, &search, tried);
            }
            chosen = minimum(absmax * factor, limit);
            block[in_block].is_compared = search.weights && factor != 0.0f;
        }
        if (chosen < KT_SMALLEST_NORMAL) {
            scale[r] = 0.0f;
            memset(codes, 0, (size_t)k);
        } else {
            scale[r] = chosen;
            kernels->scale_codes(&search, search.ratios[tried[0]], codes);
        }
        if (!moments) continue;
        float *candidates = vectors + in_block * k * KT_TOGETHER;
        if (block[in_block].is_compared)
            store_candidates(kernels, &search, tried, (int8_t *)(scratch + 2 * k), candidates);
        else memset(candidates, 0, (size_t)(k * KT_TOGETHER) * sizeof *candidates);
        if (in_block + 1 == ROWS || r + 1 == n)
            choose_again(kernels, &metric, k, limit, in_block + 1, block, vectors, codes - in_block * k,
                         scale + r - in_block);
    }
    kt_leave(state);
    return *bad_row < 0 ? KTQ_OK : KTQ_ENONFINITE;
}
