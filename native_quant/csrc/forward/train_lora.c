/* LoRA's products: activations times a factor, and sums over an expert's tokens. Each product packs its factor as
 * panels of BF16. A rank row stores each of its `rank` numbers as two BF16 numbers, which keep 16 bits. */
#include <string.h>

#include "bf16.h"
#include "convert/panels.h"
#include "train.h"

static const kt_format *bf16_format(void) {
    return kt_get_format(KTQ_FORMAT_BF16);
}

static int64_t round_up(int64_t n, int64_t unit) {
    return kt_ceil_divide(n, unit) * unit;
}

int64_t ktq_rank_columns(int64_t rank) {
    return round_up(rank, KT_HALF_ROWS);
}

/* Number of columns of `a`, or of rows of `b`. */
static int64_t factor_length(const kt_training *t, kt_factor factor) {
    return (factor.projection == KT_PROJECTION_DOWN) == factor.is_b ? t->moe->hidden : t->columns;
}

/* Copies rows and columns of an expert's factor as BF16. Rows are padded with zeros from `columns` to `pitch`. */
static void read_factor(const kt_training *t, kt_factor factor, int64_t expert, int64_t row, int64_t rows,
                        int64_t column, int64_t columns, uint16_t *out, int64_t pitch) {
    int64_t rank = t->lora->rank, length = factor_length(t, factor), bytes = t->lora->float32 ? 4 : 2;
    int64_t stride = (factor.is_b ? rank : length) * bytes;
    const uint8_t *from = (factor.is_b ? t->lora->b : t->lora->a)[factor.projection];
    from += expert * rank * length * bytes + row * stride + column * bytes;
    if (t->lora->float32) t->kernels->decode(KTQ_F32, from, stride, rows, columns, 1, out, pitch);
    for (int64_t r = 0; r < rows; r++) {
        if (!t->lora->float32) memcpy(out + r * pitch, from + r * stride, (size_t)columns * sizeof *out);
        memset(out + r * pitch + columns, 0, (size_t)(pitch - columns) * sizeof *out);
    }
}

void kt_project_to_rank(const kt_training *t, kt_factor factor, int64_t expert, int64_t first, int64_t k,
                        const uint16_t *rows, int64_t pitch, int64_t m, uint16_t *rank_rows,
                        const kt_train_scratch *scratch) {
    int64_t rank = t->lora->rank, panels = kt_ceil_divide(rank, KT_PANEL_ROWS), padded = panels * KT_PANEL_ROWS;
    if (factor.is_b) read_factor(t, factor, expert, first, k, 0, rank, scratch->rows, padded);
    for (int64_t r = 0; r < padded; r += KT_PANEL_ROWS) {
        if (factor.is_b) {
            t->kernels->interleave(2, (uint8_t *)(scratch->rows + r), 2 * padded, k / 2, NULL, 0,
                                   scratch->panels + r * k);
            continue;
        }
        int64_t count = rank - r < KT_PANEL_ROWS ? rank - r : KT_PANEL_ROWS;
        read_factor(t, factor, expert, r, count, first, k, scratch->rows, k);
        memset(scratch->rows + count * k, 0, (size_t)((KT_PANEL_ROWS - count) * k) * sizeof *scratch->rows);
        kt_reorder_panel(t->kernels, 2, (uint8_t *)scratch->rows, 2 * k, k, (uint8_t *)(scratch->panels + r * k));
    }
    kt_multiply_bf16(t->kernels, bf16_format(), scratch->panels, NULL, k, 0, panels, rows, pitch, m, scratch->c,
                     scratch->gemm);
    for (int64_t i = 0; i < m; i++, rank_rows += 2 * t->rank_columns)
        for (int64_t r = 0; r < t->rank_columns; r++) {
            float x = scratch->c[(r / KT_PANEL_ROWS * m + i) * KT_PANEL_ROWS + r % KT_PANEL_ROWS];
            rank_rows[r] = kt_to_bf16(x);
            rank_rows[t->rank_columns + r] = kt_to_bf16(x - kt_from_bf16(rank_rows[r]));
        }
}

void kt_project_from_rank(const kt_training *t, kt_factor factor, int64_t expert, int64_t first,
                          const uint16_t *rank_rows, int64_t m, float *c, const kt_train_scratch *scratch) {
    int64_t rank = t->lora->rank, k = 2 * t->rank_columns;
    if (factor.is_b) {
        read_factor(t, factor, expert, first, KT_PANEL_ROWS, 0, rank, scratch->rows, k);
        for (int64_t r = 0; r < KT_PANEL_ROWS; r++)
            memcpy(scratch->rows + r * k + t->rank_columns, scratch->rows + r * k, (size_t)rank * sizeof *rank_rows);
        kt_reorder_panel(t->kernels, 2, (uint8_t *)scratch->rows, 2 * k, k, (uint8_t *)scratch->panels);
    } else {
        memset(scratch->rows, 0, (size_t)(t->rank_columns * KT_PANEL_ROWS) * sizeof *rank_rows);
        read_factor(t, factor, expert, 0, rank, first, KT_PANEL_ROWS, scratch->rows, KT_PANEL_ROWS);
        for (int64_t at = 0; at < t->rank_columns; at += t->rank_columns / 2)
            t->kernels->interleave(2, (uint8_t *)scratch->rows, 2 * KT_PANEL_ROWS, t->rank_columns / 2, NULL, at,
                                   scratch->panels);
    }
    kt_multiply_bf16(t->kernels, bf16_format(), scratch->panels, NULL, k, 0, 1, rank_rows, k, m, c, scratch->gemm);
}

/* --- dropout: a function of the seed, the projection, the pair of token and expert, and the column ---------------- */

static uint64_t mix(uint64_t x) { /* splitmix64 */
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

/* Calls DROP with each dropped column, counted from `first`. */
#define FOR_DROPPED(DROP)                                                                                              \
    const uint64_t number = (uint64_t)(t->row_pair[row] * 4 + projection);                                             \
    const uint64_t from = mix(t->lora->seed + 0x9e3779b97f4a7c15 * number);                                            \
    const uint64_t least = (uint64_t)(t->lora->dropout * 65536.0f + 0.5f);                                             \
    for (int64_t i = 0; i < columns; i += 4) {                                                                         \
        uint64_t bits = mix(from + 0x9e3779b97f4a7c15 * (uint64_t)(first + i));                                        \
        for (int j = 0; j < 4; j++, bits >>= 16)                                                                       \
            if ((bits & 0xffff) < least) DROP(i + j);                                                                  \
    }
#define SET_ZERO(i) values[i] = 0

void kt_drop_inputs(const kt_training *t, int projection, int64_t row, int64_t first, int64_t columns,
                    uint16_t *values) {
    FOR_DROPPED(SET_ZERO)
}

void kt_drop_floats(const kt_training *t, int projection, int64_t row, int64_t first, int64_t columns, float *values) {
    FOR_DROPPED(SET_ZERO)
}

/* --- the gradients of factors ------------------------------------------------------------------------------------- */

/* A sum over tokens of rank rows times rows. count: number of arrays of rank rows, `pitch` apart (the slices of down).
   terms: BF16 numbers of each rank row's number. */
typedef struct {
    const uint16_t *rank_rows;
    int64_t count, pitch, terms;
    const uint16_t *rows;
} token_sum;

static token_sum make_token_sum(const kt_training *t, kt_factor factor) {
    int64_t rows = t->pass.rows * 2 * t->rank_columns;
    const uint16_t *forward = t->saved->rank_rows + factor.projection * rows,
                   *gradient = t->rank_gradient[factor.projection];
    if (factor.projection == KT_PROJECTION_DOWN)
        return factor.is_b ? (token_sum){forward, t->moe->slices, rows, 2, t->gradient}
                           : (token_sum){gradient, 1, 0, 2, t->saved->act};
    if (factor.is_b)
        return (token_sum){forward, 1, 0, 2,
                           factor.projection == KT_PROJECTION_GATE ? t->gate_gradient : t->up_gradient};
    return (token_sum){gradient, 1, 0, 1, t->x}; /* rounded, as in kt-kernel */
}

/* Transposes an expert's rank rows to rows of `padded` tokens: all rows of the first term, then those of the second. */
static int64_t gather_rank_columns(const kt_training *t, const token_sum *sum, const kt_bucket *bucket, int64_t padded,
                                   uint16_t *out) {
    int64_t count = 0;
    for (int64_t slice = 0; slice < sum->count; slice++)
        for (int64_t term = 0; term < sum->terms; term++)
            for (int64_t r = 0; r < t->lora->rank; r++, count++, out += padded) {
                const uint16_t *rank_rows = sum->rank_rows + slice * sum->pitch + bucket->first * 2 * t->rank_columns +
                                            term * t->rank_columns + r;
                for (int64_t i = 0; i < padded; i++) out[i] = i < bucket->m ? rank_rows[i * 2 * t->rank_columns] : 0;
            }
    return count;
}

/* Packs 32 columns of an expert's rows, from `first` on, as a panel whose columns are tokens. */
static void pack_rows(const kt_training *t, kt_factor factor, const uint16_t *rows, const kt_bucket *bucket,
                      int64_t first, int64_t padded, const kt_train_scratch *scratch) {
    const int drop = t->lora->dropout > 0 && !factor.is_b;
    int64_t m = bucket->m, pitch = factor_length(t, factor), in_place = drop ? 0 : m / 2 * 2;
    rows += bucket->first * pitch + first;
    t->kernels->interleave(2, (const uint8_t *)rows, 2 * pitch, in_place / 2, NULL, 0, scratch->panels);
    uint16_t *copy = scratch->rows;
    for (int64_t i = in_place; i < m; i++, copy += KT_PANEL_ROWS) {
        memcpy(copy, rows + i * pitch, KT_PANEL_ROWS * sizeof *copy);
        if (drop) kt_drop_inputs(t, factor.projection, bucket->first + i, first, KT_PANEL_ROWS, copy);
    }
    memset(copy, 0, KT_PANEL_ROWS * sizeof *copy); /* an odd number of tokens: the last pair is incomplete */
    t->kernels->interleave(2, (uint8_t *)scratch->rows, 2 * KT_PANEL_ROWS, kt_ceil_divide(m - in_place, 2), NULL,
                           in_place / 2, scratch->panels);
    for (int64_t pair = kt_ceil_divide(m, 2); pair < padded / 2; pair++)
        for (int half = 0; half < 2; half++)
            memset(kt_panel_line(scratch->panels, pair) + half * KT_HALF_BYTES / 2, 0, 64);
}

/* Writes 32 columns of a gradient, c[rank][32], to the gradient of `a` [rank][length] or `b` [length][rank]. */
static void store_gradient(const kt_training *t, kt_factor factor, float *c, int64_t length, int64_t first,
                           uint8_t *out, const kt_train_scratch *scratch) {
    int64_t rank = t->lora->rank, count = rank * KT_PANEL_ROWS, bytes = t->lora->float32 ? 4 : 2;
    const float *numbers[] = {c};
    if (factor.is_b) {
        float *transposed = (float *)scratch->rounded;
        t->kernels->transpose(4, (uint8_t *)c, KT_PANEL_ROWS * sizeof *c, KT_PANEL_ROWS, rank, (uint8_t *)transposed,
                              rank * (int64_t)sizeof *transposed);
        numbers[0] = transposed;
        out += first * rank * bytes;
        if (t->lora->float32) memcpy(out, transposed, (size_t)count * sizeof *transposed);
        else t->kernels->merge(1, numbers, count, (uint16_t *)out);
        return;
    }
    if (!t->lora->float32) t->kernels->merge(1, numbers, count, scratch->rounded);
    const uint8_t *rows = t->lora->float32 ? (uint8_t *)c : (uint8_t *)scratch->rounded;
    for (int64_t r = 0; r < rank; r++)
        memcpy(out + (r * length + first) * bytes, rows + r * KT_PANEL_ROWS * bytes, (size_t)(KT_PANEL_ROWS * bytes));
}

void kt_factor_gradient(const kt_training *t, const kt_range *range, const kt_train_scratch *scratch) {
    const kt_factor factor = {range->slice % 2, (int)range->slice / 2};
    const kt_bucket *bucket = &t->pass.bucket[range->bucket];
    const token_sum sum = make_token_sum(t, factor);
    int64_t rank = t->lora->rank, length = factor_length(t, factor), padded = round_up(bucket->m, KT_PANEL_ROWS);
    int64_t count = gather_rank_columns(t, &sum, bucket, padded, scratch->token_rows);
    uint8_t *out = (factor.is_b ? t->gradients->b : t->gradients->a)[factor.projection];
    out += bucket->expert * rank * length * (t->lora->float32 ? 4 : 2);
    for (int64_t first = range->first * KT_PANEL_ROWS; first < (range->first + range->count) * KT_PANEL_ROWS;
         first += KT_PANEL_ROWS) {
        pack_rows(t, factor, sum.rows, bucket, first, padded, scratch);
        kt_multiply_bf16(t->kernels, bf16_format(), scratch->panels, NULL, padded, 0, 1, scratch->token_rows, padded,
                         count, scratch->c, scratch->gemm);
        for (int64_t r = 0; r < rank; r++) {
            const float *rows[2 * KTQ_MAX_SLICES];
            float weights[2 * KTQ_MAX_SLICES];
            for (int64_t i = 0; i < count / rank; i++) {
                rows[i] = scratch->c + (r + i * rank) * KT_PANEL_ROWS;
                weights[i] = t->scaling * t->gradients->scale;
            }
            t->kernels->combine(count / rank, rows, weights, KT_PANEL_ROWS, scratch->c + r * KT_PANEL_ROWS);
        }
        store_gradient(t, factor, scratch->c, length, first, out, scratch);
    }
}
