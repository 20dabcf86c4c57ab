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

/* The first of the candidates with the least error. */
static int best_of(const kt_kernels *kernels, const kt_group_search *search, int8_t *codes) {
    float lanes[KT_CANDIDATES * KT_SUM_LANES], least = 0.0f;
    int best = 0;
    kernels->group_errors(search, lanes, codes);
    for (int i = 0; i < search->count; i++) {
        float error = kt_add_lanes(lanes + i * KT_SUM_LANES);
        if (i && !(error < least)) continue;
        least = error;
        best = i;
    }
    return best;
}

int ktq_search_groups(int kind, int64_t n, int64_t k, const uint8_t *rows, int64_t row_stride, const float *importance,
                      float *scratch, int8_t *codes, uint8_t *scales, int64_t *bad_row) {
    if (kind < 0 || kind >= (int)(sizeof grids / sizeof *grids) || n < 1 || k < COLUMNS || k % COLUMNS)
        return KTQ_EINVAL;
    if (!rows || !scratch || !codes || !scales || !bad_row) return KTQ_EINVAL;

    const kt_kernels *kernels = kt_current();
    const grid *of = &grids[kind];
    kt_fp_state state = kt_enter();
    const float *weights = weights_of(importance, k, scratch);
    kt_group_search search = {.codes = of->codes};
    *bad_row = -1;
    for (int64_t r = 0; r < n && *bad_row < 0; r++)
        for (int64_t c = 0; c < k; c += COLUMNS, codes += COLUMNS, scales += of->scale_bytes) {
            search.values = rows + r * row_stride + 2 * c;
            search.weights = weights + c;
            uint16_t largest = kt_group_largest(search.values, COLUMNS), amax = largest & KT_BF16_MAGNITUDE;
            uint16_t stored[KT_CANDIDATES] = {of->of_zeros};
            int8_t tried[KT_CANDIDATES * COLUMNS];
            int best = 0;
            if (amax >= KT_BF16_INFINITY) {
                *bad_row = r;
                break;
            }
            if (amax) {
                of->candidates(largest, &search, stored);
                for (int i = 0; i < search.count; i++) search.reciprocals[i] = 1.0f / search.scales[i];
                best = best_of(kernels, &search, tried);
            } else memset(tried, 0, COLUMNS);
            memcpy(codes, tried + best * COLUMNS, COLUMNS);
            memcpy(scales, &stored[best], (size_t)of->scale_bytes);
        }
    kt_leave(state);
    return *bad_row < 0 ? KTQ_OK : KTQ_ENONFINITE;
}
