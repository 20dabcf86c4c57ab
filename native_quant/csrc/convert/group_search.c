/* Search of group scales: a loop that measures groups and chooses the best candidate for each scale. Defines the grids
 * and their candidates, without instruction sets. */
#include <string.h>

#include "bf16.h"
#include "groups_row.h"
#include "kernels.h"
#include "pack_mxfp4.h"

enum { COLUMNS = KT_SEARCHED_GROUP };

/* A grid.
     codes        its codes
     scale_bytes  bytes of a stored scale
     zero_scale   stored scale of a group of zeros
     candidates   sets unit, count and scales of a search, and the stored scales, from the group's value of largest
                  magnitude, which is not 0 */
typedef struct {
    kt_code_range codes;
    int scale_bytes;
    uint16_t zero_scale;
    void (*candidates)(uint16_t largest, kt_group_search *search, uint16_t *stored);
} search_grid;

static int clamp(int x) {
    return x < KT_MXFP4_LEAST ? KT_MXFP4_LEAST : x > KT_MXFP4_MOST ? KT_MXFP4_MOST : x;
}

/* MXFP4: powers of two. One that covers the largest value, the next larger one, and two smaller ones, which clip
 * values. */
static void powers(uint16_t largest, kt_group_search *search, uint16_t *stored) {
    static const int offsets[] = {0, 1, -1, -2};
    int covers = clamp(((largest & KT_BF16_MAGNITUDE) >> 7) - 2);
    search->unit = kt_float((uint32_t)(254 - covers) << 23);
    search->count = sizeof offsets / sizeof *offsets;
    for (int i = 0; i < search->count; i++) {
        int e = clamp(covers + offsets[i]);
        search->scales[i] = kt_float((uint32_t)(127 + e - covers) << 23) * 0.5f;
        stored[i] = (uint16_t)e;
    }
}

/* RAWINT4: scales that give the largest value one of these codes, before clipping to -8..7. The first is that of
 * absmax. */
static void signed_steps(uint16_t largest, kt_group_search *search, uint16_t *stored) {
    static const float codes[KT_CANDIDATES] = {-8.0f,  -7.75f, -7.5f, -7.0f,  -6.5f, -8.25f, -8.5f, -9.0f,
                                               -9.5f, -10.5f, -12.0f, 7.25f, 7.75f, 6.75f, 8.5f, 10.0f};
    int exponent = (largest & KT_BF16_MAGNITUDE) >> 7;
    exponent = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
    search->unit = kt_float((uint32_t)(254 - exponent) << 23);
    search->count = KT_CANDIDATES;
    for (int i = 0; i < KT_CANDIDATES; i++) {
        stored[i] = kt_to_bf16(kt_from_bf16(largest) / codes[i]);
        if (!(stored[i] & KT_BF16_MAGNITUDE)) stored[i] = kt_to_bf16(KT_EMPTY_SCALE);
        search->scales[i] = kt_from_bf16(stored[i]) * search->unit;
    }
}

/* Indexed by KTQ_GROUPS_*. */
static const search_grid grids[] = {
    [KTQ_GROUPS_MXFP4] = {{-12, 12, 2}, 1, KT_MXFP4_ZERO_EXPONENT, powers},
    [KTQ_GROUPS_RAWINT4] = {{-8, 7, 0}, 2, 0x3c00, signed_steps}, /* 2^-7: KT_EMPTY_SCALE */
};

/* Returns importance divided by its largest value in the group; 1 in groups where that is 0. */
static const float *normalize_importance(const float *importance, int64_t k, float *weights) {
    for (int64_t first = 0; first < k; first += COLUMNS) {
        float largest = 0.0f;
        for (int64_t c = first; importance && c < first + COLUMNS; c++)
            largest = importance[c] > largest ? importance[c] : largest;
        for (int64_t c = first; c < first + COLUMNS; c++)
            weights[c] = largest != 0.0f ? importance[c] / largest : 1.0f;
    }
    return weights;
}

/* Returns the first candidate with the least error, which `errors` measures. Writes the codes of all candidates. */
static int find_best(kt_group_errors_fn *errors, const kt_group_search *search, int8_t *codes) {
    float lanes[KT_CANDIDATES * KT_SUM_LANES], least = 0.0f;
    int best = 0;
    errors(search, lanes, codes);
    for (int i = 0; i < search->count; i++) {
        float error = kt_add_lanes(lanes + i * KT_SUM_LANES);
        if (i && !(error < least)) continue;
        least = error;
        best = i;
    }
    return best;
}

/* Chooses the codes and the scale of the group whose values and weights search has. Returns 0 if a value is not finite,
   else 1. If errors is not NULL: *unit becomes the group's unit (0 for a group of zeros), errors the remaining error of
   each value in that unit. */
static int choose(kt_group_errors_fn *measure, const search_grid *grid, kt_group_search *search, int8_t *codes,
                  uint8_t *scale, float *unit, float *errors) {
    uint16_t largest = kt_group_largest(search->values, COLUMNS), amax = largest & KT_BF16_MAGNITUDE;
    uint16_t stored[KT_CANDIDATES] = {grid->zero_scale};
    int8_t tried[KT_CANDIDATES * COLUMNS];
    int best = 0;
    if (amax >= KT_BF16_INFINITY) return 0;
    if (amax) {
        grid->candidates(largest, search, stored);
        for (int i = 0; i < search->count; i++) search->reciprocals[i] = 1.0f / search->scales[i];
        best = find_best(measure, search, tried);
    } else memset(tried, 0, COLUMNS);
    memcpy(codes, tried + best * COLUMNS, COLUMNS);
    memcpy(scale, &stored[best], (size_t)grid->scale_bytes);
    if (!errors) return 1;
    *unit = amax ? search->unit : 0.0f;
    for (int64_t c = 0; c < COLUMNS; c++) {
        float x = amax ? kt_from_bf16(kt_load16(search->values + 2 * c)) * search->unit : 0.0f;
        errors[c * KT_TOGETHER] = x - (amax ? codes[c] * search->scales[best] : 0.0f);
    }
    return 1;
}

/* Returns the factor that converts errors from a group's unit to the row's unit, which is the least unit of its groups;
   0 for a group of zeros. */
static float row_ratio(float unit, float least) {
    return unit == 0.0f ? 0.0f : least / unit > 0x1p-60f ? least / unit : 0x1p-60f;
}

/* Chooses the groups of rows again, one after the other, in the metric of second moments, with the current errors of
   the other groups. errors[ROWS / KT_TOGETHER][k][KT_TOGETHER], in the row's unit; ratios[ROWS][k / COLUMNS]: from
   row_ratio. */
static void choose_again(const kt_kernels *kernels, const search_grid *grid, const kt_moments *moments, int rows,
                         const uint8_t *values, int64_t row_stride, int64_t k, float *errors, const float *ratios,
                         int8_t *codes, uint8_t *scales) {
    enum { HALVES = COLUMNS / KT_SUM_LANES, FOURS = KT_SEARCHED_ROWS / KT_TOGETHER };
    _Alignas(64) float panel[KT_SEARCHED_DEPTH * KT_SUM_LANES], block[COLUMNS * COLUMNS], start[COLUMNS];
    _Alignas(64) float sums[HALVES][FOURS][KT_TOGETHER][KT_SUM_LANES];
    for (int64_t column = 0; column < k; column += COLUMNS) {
        int counts = 0;
        for (int64_t c = column; c < column + COLUMNS; c++)
            counts |= moments->values[c * moments->stride + c] * moments->unit != 0.0f;
        if (!counts) continue;
        memset(sums, 0, sizeof sums);
        for (int64_t first = 0; first < k; first += KT_SEARCHED_DEPTH) {
            int64_t count = k - first < KT_SEARCHED_DEPTH ? k - first : KT_SEARCHED_DEPTH;
            for (int h = 0; h < HALVES; h++) {
                for (int64_t i = 0; i < count; i++) {
                    const float *row = moments->values + (first + i) * moments->stride + column + h * KT_SUM_LANES;
                    int in_group = first + i >= column && first + i < column + COLUMNS;
                    for (int l = 0; l < KT_SUM_LANES; l++)
                        panel[i * KT_SUM_LANES + l] = in_group ? 0.0f : row[l] * moments->unit;
                }
                for (int f = 0; f * KT_TOGETHER < rows; f++)
                    kernels->outer_sums(count, errors + (f * k + first) * KT_TOGETHER, panel, sums[h][f][0]);
            }
        }
        kt_copy_moments(moments, column, COLUMNS, column, COLUMNS, block);
        kt_group_search search = {.codes = grid->codes, .weights = start, .moments = block};
        for (int r = 0; r < rows; r++) {
            int64_t four = r / KT_TOGETHER, group = (r * k + column) / COLUMNS;
            float ratio = ratios[group], *group_errors = errors + (four * k + column) * KT_TOGETHER + r % KT_TOGETHER,
                  unit;
            if (ratio == 0.0f) continue;
            for (int c = 0; c < COLUMNS; c++)
                start[c] = sums[c / KT_SUM_LANES][four][r % KT_TOGETHER][c % KT_SUM_LANES] * (2.0f / ratio);
            search.values = values + r * row_stride + 2 * column;
            choose(kernels->group_forms, grid, &search, codes + r * k + column, scales + group * grid->scale_bytes,
                   &unit, group_errors);
            for (int c = 0; c < COLUMNS; c++) group_errors[c * KT_TOGETHER] *= ratio;
        }
    }
}

int ktq_search_groups(int kind, int64_t n, int64_t k, const uint8_t *rows, int64_t row_stride, const float *importance,
                      const float *moments, int64_t moments_stride, float *scratch, float *vectors, int8_t *codes,
                      uint8_t *scales, int64_t *bad_row) {
    if (kind < 0 || kind >= (int)(sizeof grids / sizeof *grids) || n < 1 || k < COLUMNS || k % COLUMNS)
        return KTQ_EINVAL;
    if (!rows || !scratch || !codes || !scales || !bad_row || (moments && !vectors)) return KTQ_EINVAL;

    const kt_kernels *kernels = kt_current();
    const search_grid *grid = &grids[kind];
    const int64_t groups = k / COLUMNS;
    kt_fp_state state = kt_enter();
    kt_group_search search = {.codes = grid->codes};
    const float *weights = normalize_importance(importance, k, scratch);
    const kt_moments metric = moments ? kt_make_moments(moments, moments_stride, k) : (kt_moments){0};
    float *errors = metric.unit != 0.0f ? vectors : NULL, *ratios = errors ? vectors + KT_SEARCHED_ROWS * k : NULL;
    *bad_row = -1;
    for (int64_t first = 0; first < n && *bad_row < 0; first += KT_SEARCHED_ROWS) {
        int count = n - first < KT_SEARCHED_ROWS ? (int)(n - first) : KT_SEARCHED_ROWS;
        if (errors) memset(errors, 0, (size_t)(KT_SEARCHED_ROWS * k) * sizeof *errors);
        for (int r = 0; r < count && *bad_row < 0; r++) {
            float *group_errors = errors ? errors + r / KT_TOGETHER * k * KT_TOGETHER + r % KT_TOGETHER : NULL;
            float *units = errors ? ratios + r * groups : NULL;
            for (int64_t g = 0; g < groups && *bad_row < 0; g++) {
                int64_t c = g * COLUMNS, group = (first + r) * groups + g;
                search.values = rows + (first + r) * row_stride + 2 * c;
                search.weights = weights + c;
                if (!choose(kernels->group_errors, grid, &search, codes + (first + r) * k + c,
                            scales + group * grid->scale_bytes, errors ? units + g : NULL,
                            errors ? group_errors + c * KT_TOGETHER : NULL))
                    *bad_row = first + r;
            }
            float least = 0.0f;
            for (int64_t g = 0; errors && g < groups; g++)
                if (units[g] != 0.0f && (least == 0.0f || units[g] < least)) least = units[g];
            for (int64_t c = 0; errors && c < k; c++) {
                float *ratio = units + c / COLUMNS;
                if (c % COLUMNS == 0) *ratio = row_ratio(*ratio, least);
                group_errors[c * KT_TOGETHER] *= *ratio;
            }
        }
        if (errors && *bad_row < 0)
            choose_again(kernels, grid, &metric, count, rows + first * row_stride, row_stride, k, errors, ratios,
                         codes + first * k, scales + first * groups * grid->scale_bytes);
    }
    kt_leave(state);
    return *bad_row < 0 ? KTQ_OK : KTQ_ENONFINITE;
}
