/* LoRA's products: activations times a factor, and sums over an expert's tokens. Factors are packed as panels of BF16
 * each time; what has only `rank` columns is two BF16 numbers for each, which keep 16 bits. */
#include <string.h>

#include "bf16.h"
#include "convert/panels.h"
#include "train.h"

static const kt_format *bf16_format(void) {
    return kt_format_of(KTQ_FORMAT_BF16);
}

static int64_t round_up(int64_t n, int64_t unit) {
    return kt_blocks(n, unit) * unit;
}

int64_t ktq_low_columns(int64_t rank) {
    return round_up(rank, KT_HALF_ROWS);
}

/* The columns of `a`, the rows of `b`. */
static int64_t length_of(const kt_training *t, kt_factor factor) {
    return (factor.projection == KT_PROJECTION_DOWN) == factor.is_b ? t->moe->hidden : t->columns;
}

/* Rows and columns of a factor of an expert as BF16. `columns` columns become `pitch`, with zeros. */
static void read_factor(const kt_training *t, kt_factor factor, int64_t expert, int64_t row, int64_t rows,
                        int64_t column, int64_t columns, uint16_t *out, int64_t pitch) {
    int64_t rank = t->lora->rank, length = length_of(t, factor), bytes = t->lora->float32 ? 4 : 2;
    int64_t stride = (factor.is_b ? rank : length) * bytes;
    const uint8_t *from = (factor.is_b ? t->lora->b : t->lora->a)[factor.projection];
    from += expert * rank * length * bytes + row * stride + column * bytes;
    if (t->lora->float32) t->kernels->decode(KTQ_F32, from, stride, rows, columns, 1, out, pitch);
    for (int64_t r = 0; r < rows; r++) {
        if (!t->lora->float32) memcpy(out + r * pitch, from + r * stride, (size_t)columns * sizeof *out);
        memset(out + r * pitch + columns, 0, (size_t)(pitch - columns) * sizeof *out);
    }
}

void kt_narrow(const kt_training *t, kt_factor factor, int64_t expert, int64_t first, int64_t k, const uint16_t *rows,
               int64_t pitch, int64_t m, uint16_t *low, const kt_train_scratch *scratch) {
    int64_t rank = t->lora->rank, panels = kt_blocks(rank, KT_PANEL_ROWS), padded = panels * KT_PANEL_ROWS;
    if (factor.is_b) read_factor(t, factor, expert, first, k, 0, rank, scratch->rows, padded);
    for (int64_t r = 0; r < padded; r += KT_PANEL_ROWS) {
        if (factor.is_b) {
            t->kernels->interleave(2, (uint8_t *)(scratch->rows + r), 2 * padded, k / 2, NULL, 0,
                                   scratch->panels + r * k);
            continue;
        }
        int64_t some = rank - r < KT_PANEL_ROWS ? rank - r : KT_PANEL_ROWS;
        read_factor(t, factor, expert, r, some, first, k, scratch->rows, k);
        memset(scratch->rows + some * k, 0, (size_t)((KT_PANEL_ROWS - some) * k) * sizeof *scratch->rows);
        kt_reorder_panel(t->kernels, 2, (uint8_t *)scratch->rows, 2 * k, k, (uint8_t *)(scratch->panels + r * k));
    }
    kt_multiply_bf16(t->kernels, bf16_format(), scratch->panels, NULL, k, 0, panels, rows, pitch, m, scratch->c,
                     scratch->gemm);
    for (int64_t i = 0; i < m; i++, low += 2 * t->low)
        for (int64_t r = 0; r < t->low; r++) {
            float x = scratch->c[(r / KT_PANEL_ROWS * m + i) * KT_PANEL_ROWS + r % KT_PANEL_ROWS];
            low[r] = kt_to_bf16(x);
            low[t->low + r] = kt_to_bf16(x - kt_from_bf16(low[r]));
        }
}

void kt_widen(const kt_training *t, kt_factor factor, int64_t expert, int64_t first, const uint16_t *low, int64_t m,
              float *c, const kt_train_scratch *scratch) {
    int64_t rank = t->lora->rank, k = 2 * t->low;
    if (factor.is_b) {
        read_factor(t, factor, expert, first, KT_PANEL_ROWS, 0, rank, scratch->rows, k);
        for (int64_t r = 0; r < KT_PANEL_ROWS; r++)
            memcpy(scratch->rows + r * k + t->low, scratch->rows + r * k, (size_t)rank * sizeof *low);
        kt_reorder_panel(t->kernels, 2, (uint8_t *)scratch->rows, 2 * k, k, (uint8_t *)scratch->panels);
    } else {
        memset(scratch->rows, 0, (size_t)(t->low * KT_PANEL_ROWS) * sizeof *low);
        read_factor(t, factor, expert, 0, rank, first, KT_PANEL_ROWS, scratch->rows, KT_PANEL_ROWS);
        for (int64_t at = 0; at < t->low; at += t->low / 2)
            t->kernels->interleave(2, (uint8_t *)scratch->rows, 2 * KT_PANEL_ROWS, t->low / 2, NULL, at,
                                   scratch->panels);
    }
    kt_multiply_bf16(t->kernels, bf16_format(), scratch->panels, NULL, k, 0, 1, low, k, m, c, scratch->gemm);
}

/* --- dropout: a function of seed, projection, token and place, and column ----------------------------------------- */

static uint64_t mix(uint64_t x) { /* splitmix64 */
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

/* Calls LEAVE_OUT with the number of each column that is left out, counted from `first`. */
#define FOR_DROPPED(LEAVE_OUT)                                                                                         \
    const uint64_t number = (uint64_t)(t->pair_of[row] * 4 + projection);                                              \
    const uint64_t from = mix(t->lora->seed + 0x9e3779b97f4a7c15 * number);                                          \
    const uint64_t least = (uint64_t)(t->lora->dropout * 65536.0f + 0.5f);                                             \
    for (int64_t i = 0; i < columns; i += 4) {                                                                         \
        uint64_t bits = mix(from + 0x9e3779b97f4a7c15 * (uint64_t)(first + i));                                      \
        for (int j = 0; j < 4; j++, bits >>= 16)                                                                       \
            if ((bits & 0xffff) < least) LEAVE_OUT(i + j);                                                             \
    }
#define LEAVE_OUT(i) values[i] = 0

void kt_drop(const kt_training *t, int projection, int64_t row, int64_t first, int64_t columns, uint16_t *values) {
    FOR_DROPPED(LEAVE_OUT)
}

void kt_drop_floats(const kt_training *t, int projection, int64_t row, int64_t first, int64_t columns, float *values) {
    FOR_DROPPED(LEAVE_OUT)
}

/* --- the gradients of factors ------------------------------------------------------------------------------------- */

/* A sum over tokens: low rows (several of them: parts of down), times rows. terms: of a low number. */
typedef struct {
    const uint16_t *low;
    int64_t count, pitch, terms;
    const uint16_t *rows;
} token_sum;

static token_sum token_sum_of(const kt_training *t, kt_factor factor) {
    int64_t rows = t->pass.rows * 2 * t->low;
    const uint16_t *kept = t->kept->low + factor.projection * rows, *given = t->of_low[factor.projection];
    if (factor.projection == KT_PROJECTION_DOWN)
        return factor.is_b ? (token_sum){kept, t->moe->parts, rows, 2, t->gradient}
                           : (token_sum){given, 1, 0, 2, t->kept->act};
    if (factor.is_b) return (token_sum){kept, 1, 0, 2, factor.projection == KT_PROJECTION_GATE ? t->of_gate : t->of_up};
    return (token_sum){given, 1, 0, 1, t->x}; /* rounded, as in kt-kernel */
}

/* Column r of an expert's low rows becomes a row of `padded` tokens; the terms' after those of the first. */
static int64_t gather_low(const kt_training *t, const token_sum *sum, const kt_bucket *bucket, int64_t padded,
                          uint16_t *out) {
    int64_t count = 0;
    for (int64_t part = 0; part < sum->count; part++)
        for (int64_t term = 0; term < sum->terms; term++)
            for (int64_t r = 0; r < t->lora->rank; r++, count++, out += padded) {
                const uint16_t *low = sum->low + part * sum->pitch + bucket->first * 2 * t->low + term * t->low + r;
                for (int64_t i = 0; i < padded; i++) out[i] = i < bucket->m ? low[i * 2 * t->low] : 0;
            }
    return count;
}

/* 32 columns of an expert's rows from `first` on, as the panel whose columns are tokens. */
static void pack_rows(const kt_training *t, kt_factor factor, const uint16_t *rows, const kt_bucket *bucket,
                      int64_t first, int64_t padded, const kt_train_scratch *scratch) {
    const int drop = t->lora->dropout > 0 && !factor.is_b;
    int64_t m = bucket->m, pitch = length_of(t, factor), in_place = drop ? 0 : m / 2 * 2;
    rows += bucket->first * pitch + first;
    t->kernels->interleave(2, (const uint8_t *)rows, 2 * pitch, in_place / 2, NULL, 0, scratch->panels);
    uint16_t *copy = scratch->rows;
    for (int64_t i = in_place; i < m; i++, copy += KT_PANEL_ROWS) {
        memcpy(copy, rows + i * pitch, KT_PANEL_ROWS * sizeof *copy);
        if (drop) kt_drop(t, factor.projection, bucket->first + i, first, KT_PANEL_ROWS, copy);
    }
    memset(copy, 0, KT_PANEL_ROWS * sizeof *copy); /* the last one may have no partner */
    t->kernels->interleave(2, (uint8_t *)scratch->rows, 2 * KT_PANEL_ROWS, kt_blocks(m - in_place, 2), NULL,
                           in_place / 2, scratch->panels);
    for (int64_t pair = kt_blocks(m, 2); pair < padded / 2; pair++)
        for (int half = 0; half < 2; half++)
            memset(kt_panel_line(scratch->panels, pair) + half * KT_HALF_BYTES / 2, 0, 64);
}

/* 32 columns of a gradient from c[rank][32], to where those of `a` [rank][length] or `b` [length][rank] lie. */
static void store_gradient(const kt_training *t, kt_factor factor, float *c, int64_t length, int64_t first,
                           uint8_t *out, const kt_train_scratch *scratch) {
    int64_t rank = t->lora->rank, count = rank * KT_PANEL_ROWS, bytes = t->lora->float32 ? 4 : 2;
    const float *numbers[] = {c};
    if (factor.is_b) {
        float *turned = (float *)scratch->rounded;
        t->kernels->transpose(4, (uint8_t *)c, KT_PANEL_ROWS * sizeof *c, KT_PANEL_ROWS, rank, (uint8_t *)turned,
                              rank * (int64_t)sizeof *turned);
        numbers[0] = turned;
        out += first * rank * bytes;
        if (t->lora->float32) memcpy(out, turned, (size_t)count * sizeof *turned);
        else t->kernels->merge(1, numbers, count, (uint16_t *)out);
        return;
    }
    if (!t->lora->float32) t->kernels->merge(1, numbers, count, scratch->rounded);
    const uint8_t *rows = t->lora->float32 ? (uint8_t *)c : (uint8_t *)scratch->rounded;
    for (int64_t r = 0; r < rank; r++)
        memcpy(out + (r * length + first) * bytes, rows + r * KT_PANEL_ROWS * bytes, (size_t)(KT_PANEL_ROWS * bytes));
}

void kt_factor_gradient(const kt_training *t, const kt_slice *slice, const kt_train_scratch *scratch) {
    const kt_factor factor = {slice->part % 2, (int)slice->part / 2};
    const kt_bucket *bucket = &t->pass.bucket[slice->bucket];
    const token_sum sum = token_sum_of(t, factor);
    int64_t rank = t->lora->rank, length = length_of(t, factor), padded = round_up(bucket->m, KT_PANEL_ROWS);
    int64_t count = gather_low(t, &sum, bucket, padded, scratch->low);
    uint8_t *out = (factor.is_b ? t->gradients->b : t->gradients->a)[factor.projection];
    out += bucket->expert * rank * length * (t->lora->float32 ? 4 : 2);
    for (int64_t first = slice->first * KT_PANEL_ROWS; first < (slice->first + slice->count) * KT_PANEL_ROWS;
         first += KT_PANEL_ROWS) {
        pack_rows(t, factor, sum.rows, bucket, first, padded, scratch);
        kt_multiply_bf16(t->kernels, bf16_format(), scratch->panels, NULL, padded, 0, 1, scratch->low, padded, count,
                         scratch->c, scratch->gemm);
        for (int64_t r = 0; r < rank; r++) {
            const float *rows[2 * KTQ_MOST_PARTS];
            float weights[2 * KTQ_MOST_PARTS];
            for (int64_t i = 0; i < count / rank; i++) {
                rows[i] = scratch->c + (r + i * rank) * KT_PANEL_ROWS;
                weights[i] = t->scaling * t->gradients->scale;
            }
            t->kernels->combine(count / rank, rows, weights, KT_PANEL_ROWS, scratch->c + r * KT_PANEL_ROWS);
        }
        store_gradient(t, factor, scratch->c, length, first, out, scratch);
    }
}
