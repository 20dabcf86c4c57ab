/* The loop: groups are measured, and the best of the candidates for their scales is taken. Knows the grids and their
 * candidates, but no instruction set. */
#include <string.h>

#include "bf16.h"
#include "groups_row.h"
#include "kernels.h"
#include "pack_mxfp4.h"

enum { COLUMNS = KT_SEARCHED_GROUP };

/* A grid: its codes, the bytes of a scale as it is stored, that of a group of zeros, and the candidates of a group with
   this value of largest magnitude, which is not 0: unit, count, scales, and what is stored. */
typedef struct {
    kt_code_range codes;
    int scale_bytes;
    uint16_t of_zeros;
    void (*candidates)(uint16_t largest, kt_group_search *search, uint16_t *stored);
} grid;

static int clamp(int x) {
    return x < KT_MXFP4_LEAST ? KT_MXFP4_LEAST : x > KT_MXFP4_MOST ? KT_MXFP4_MOST : x;
}

/* E2M1 with a power of two: the one that covers the largest value, the next one, and two that cut values. */
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

/* RAWINT4: the largest value has one of these codes, before it is cut to -8..7. The first is that of absmax. */
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

/* By KTQ_GROUPS_... */
static const grid grids[] = {
    [KTQ_GROUPS_MXFP4] = {{-12, 12, 2}, 1, KT_MXFP4_OF_ZEROS, powers},
    [KTQ_GROUPS_RAWINT4] = {{-8, 7, 0}, 2, 0x3c00, signed_steps}, /* 2^-7, as KT_EMPTY_SCALE */
};

/* importance / the largest of its group; 1 in groups where that is 0. */
static const float *weights_of(const float *importance, int64_t k, float *weights) {
    for (int64_t first = 0; first < k; first += COLUMNS) {
        float largest = 0.0f;
        for (int64_t c = first; importance && c < first + COLUMNS; c++)
            largest = importance[c] > largest ? importance[c] : largest;
        for (int64_t c = first; c < first + COLUMNS; c++)
            weights[c] = largest != 0.0f ? importance[c] / largest : 1.0f;
    }
    return weights;
}

/* The first of the candidates with the least error, as `errors` measures it; codes: of all candidates. */
static int best_of(kt_group_errors_fn *errors, const kt_group_search *search, int8_t *codes) {
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

/* Chooses for one group, of which search has values and weights: codes and scale are written. Returns 0 if a value is
   not finite, else 1. unit: of the group, 0 where it is zeros; errors: what is left of each value, in that unit; or
   NULL. */
static int choose(kt_group_errors_fn *measure, const grid *of, kt_group_search *search, int8_t *codes, uint8_t *scale,
                  float *unit, float *errors) {
    uint16_t largest = kt_group_largest(search->values, COLUMNS), amax = largest & KT_BF16_MAGNITUDE;
    uint16_t stored[KT_CANDIDATES] = {of->of_zeros};
    int8_t tried[KT_CANDIDATES * COLUMNS];
    int best = 0;
    if (amax >= KT_BF16_INFINITY) return 0;
    if (amax) {
        of->candidates(largest, search, stored);
        for (int i = 0; i < search->count; i++) search->reciprocals[i] = 1.0f / search->scales[i];
        best = best_of(measure, search, tried);
    } else memset(tried, 0, COLUMNS);
    memcpy(codes, tried + best * COLUMNS, COLUMNS);
    memcpy(scale, &stored[best], (size_t)of->scale_bytes);
    if (!errors) return 1;
    *unit = amax ? search->unit : 0.0f;
    for (int64_t c = 0; c < COLUMNS; c++) {
        float x = amax ? kt_from_bf16(kt_load16(search->values + 2 * c)) * search->unit : 0.0f;
        errors[c * KT_TOGETHER] = x - (amax ? codes[c] * search->scales[best] : 0.0f);
    }
    return 1;
}

/* Errors of all groups of a row count in one unit, the least: that of the group of the largest values. What 1 in a
   group's unit is there; 0 for a group of zeros. */
static float row_ratio(float unit, float least) {
    return unit == 0.0f ? 0.0f : least / unit > 0x1p-60f ? least / unit : 0x1p-60f;
}

/* Rows of which each group has a choice: they choose again, one group after the other, in the metric of second moments,
   while the errors of the other groups are what they are. errors[ROWS / KT_TOGETHER][k][KT_TOGETHER], ratios[ROWS][k /
   COLUMNS]: as row_ratio gives them. */
static void choose_again(const kt_kernels *kernels, const grid *of, const kt_moments *moments, int rows,
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
                    int own = first + i >= column && first + i < column + COLUMNS;
                    for (int l = 0; l < KT_SUM_LANES; l++)
                        panel[i * KT_SUM_LANES + l] = own ? 0.0f : row[l] * moments->unit;
                }
                for (int f = 0; f * KT_TOGETHER < rows; f++)
                    kernels->outer_sums(count, errors + (f * k + first) * KT_TOGETHER, panel, sums[h][f][0]);
            }
        }
        kt_moments_part(moments, column, COLUMNS, column, COLUMNS, block);
        kt_group_search search = {.codes = of->codes, .weights = start, .moments = block};
        for (int r = 0; r < rows; r++) {
            int64_t four = r / KT_TOGETHER, group = (r * k + column) / COLUMNS;
            float ratio = ratios[group], *own = errors + (four * k + column) * KT_TOGETHER + r % KT_TOGETHER, unit;
            if (ratio == 0.0f) continue;
            for (int c = 0; c < COLUMNS; c++)
                start[c] = sums[c / KT_SUM_LANES][four][r % KT_TOGETHER][c % KT_SUM_LANES] * (2.0f / ratio);
            search.values = values + r * row_stride + 2 * column;
            choose(kernels->group_forms, of, &search, codes + r * k + column, scales + group * of->scale_bytes, &unit,
                   own);
            for (int c = 0; c < COLUMNS; c++) own[c * KT_TOGETHER] *= ratio;
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
    const grid *of = &grids[kind];
    const int64_t groups = k / COLUMNS;
    kt_fp_state state = kt_enter();
    kt_group_search search = {.codes = of->codes};
    const float *weights = weights_of(importance, k, scratch);
    const kt_moments metric = moments ? kt_moments_of(moments, moments_stride, k) : (kt_moments){0};
    float *errors = metric.unit != 0.0f ? vectors : NULL, *ratios = errors ? vectors + KT_SEARCHED_ROWS * k : NULL;
    *bad_row = -1;
    for (int64_t first = 0; first < n && *bad_row < 0; first += KT_SEARCHED_ROWS) {
        int count = n - first < KT_SEARCHED_ROWS ? (int)(n - first) : KT_SEARCHED_ROWS;
        if (errors) memset(errors, 0, (size_t)(KT_SEARCHED_ROWS * k) * sizeof *errors);
        for (int r = 0; r < count && *bad_row < 0; r++) {
            float *own = errors ? errors + r / KT_TOGETHER * k * KT_TOGETHER + r % KT_TOGETHER : NULL;
            float *of_row = errors ? ratios + r * groups : NULL;
            for (int64_t g = 0; g < groups && *bad_row < 0; g++) {
                int64_t c = g * COLUMNS, group = (first + r) * groups + g;
                search.values = rows + (first + r) * row_stride + 2 * c;
                search.weights = weights + c;
                if (!choose(kernels->group_errors, of, &search, codes + (first + r) * k + c,
                            scales + group * of->scale_bytes, errors ? of_row + g : NULL,
                            errors ? own + c * KT_TOGETHER : NULL))
                    *bad_row = first + r;
            }
            float least = 0.0f;
            for (int64_t g = 0; errors && g < groups; g++)
                if (of_row[g] != 0.0f && (least == 0.0f || of_row[g] < least)) least = of_row[g];
            for (int64_t c = 0; errors && c < k; c++) {
                float *ratio = of_row + c / COLUMNS;
                if (c % COLUMNS == 0) *ratio = row_ratio(*ratio, least);
                own[c * KT_TOGETHER] *= *ratio;
            }
        }
        if (errors && *bad_row < 0)
            choose_again(kernels, of, &metric, count, rows + first * row_stride, row_stride, k, errors, ratios,
                         codes + first * k, scales + first * groups * of->scale_bytes);
    }
    kt_leave(state);
    return *bad_row < 0 ? KTQ_OK : KTQ_ENONFINITE;
}
