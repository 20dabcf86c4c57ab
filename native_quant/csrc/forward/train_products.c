/* Products of training: rows times a layer's weights or their transposes, in BF16 or int8, and their rounding. */
#include <string.h>

#include "bf16.h"
#include "train.h"

static const kt_format *bf16_format(void) {
    return kt_get_format(KTQ_FORMAT_BF16);
}

static kt_matrix get_matrix(const kt_training *t, const ktq_expert *table, int64_t bucket, int64_t slice,
                            int projection) {
    const ktq_expert *expert = &table[slice * t->moe->experts + t->pass.bucket[bucket].expert];
    int64_t width = t->moe->width[slice], hidden = t->moe->hidden;
    switch (projection) {
    case KT_PROJECTION_GATE: return (kt_matrix){t->pass.gate, expert->gate, expert->gate_scale, width, hidden};
    case KT_PROJECTION_UP: return (kt_matrix){t->pass.up, expert->up, expert->up_scale, width, hidden};
    }
    return (kt_matrix){t->pass.down, expert->down, expert->down_scale, hidden, width};
}

kt_matrix kt_get_matrix(const kt_training *t, int64_t bucket, int64_t slice, int projection) {
    return get_matrix(t, t->moe->expert, bucket, slice, projection);
}

void kt_round_products(const kt_training *t, int64_t m, float *c, float *lora_product, uint16_t *out, int64_t pitch,
                       const kt_train_scratch *s) {
    const float *sums[] = {c, lora_product};
    int64_t count = m * KT_PANEL_ROWS;
    t->kernels->merge(1, sums, count, s->rounded);
    t->kernels->widen_scales(KT_BF16_SCALES, (uint8_t *)s->rounded, count, c);
    if (lora_product) {
        t->kernels->combine(2, sums, (float[]){1, t->scaling}, count, c);
        t->kernels->merge(1, sums, count, s->rounded);
        t->kernels->widen_scales(KT_BF16_SCALES, (uint8_t *)s->rounded, count, c);
    }
    for (int64_t i = 0; out && i < m; i++)
        memcpy(out + i * pitch, s->rounded + i * KT_PANEL_ROWS, KT_PANEL_ROWS * sizeof *out);
}

/* The first row of a block's codes. Each block has space for a whole last tile. */
static int64_t code_row(const kt_training *t, const kt_range *block) {
    return t->pass.bucket[block->bucket].first + block->first +
           KT_MAX_TILE_ROWS * (t->block[block->bucket] + block->first / KT_TOKEN_BLOCK);
}

void kt_quantize_block(const kt_training *t, const kt_range *block, const uint16_t *rows, int64_t pitch, int64_t k,
                       const kt_int8_rows *to) {
    int64_t tile_rows = t->kernels->tiling(t->pass.gate->bits, block->count).rows, first = code_row(t, block), energy;
    for (int64_t i = 0; i < block->count; i++) {
        kt_code_row place = {to->q + first * k + kt_tile_offset(tile_rows, k, i), tile_rows * 64};
        to->scale[first + i] = t->kernels->quantize_row(
            1, rows + i * pitch, k, 1, &place, to->sums + (first + i) * kt_ceil_divide(k, KT_K_BLOCK), &energy);
    }
}

void kt_multiply_block(const kt_training *t, const kt_range *block, const kt_matrix *w, int64_t first, int64_t count,
                       const uint16_t *rows, int64_t pitch, const kt_int8_rows *codes, float *c,
                       const kt_train_scratch *s) {
    int64_t m = block->count, c_pitch = (m + KT_MAX_TILE_ROWS) * KT_PANEL_ROWS, row = code_row(t, block);
    int bits = w->format->bits;
    if (!kt_uses_int8(t)) {
        kt_multiply_bf16(t->kernels, w->format, w->codes, w->scales, w->k, first, count, rows, pitch, m, c, s->gemm);
        return;
    }
    kt_panel panel[KT_STEP_PANELS];
    for (int64_t i = 0; i < count; i++) panel[i] = kt_get_panel(bits, w->codes, w->k, first + i);
    int64_t sums_pitch = kt_ceil_divide(w->k, KT_K_BLOCK);
    int unit = w->format->gemm(t->kernels)(&(kt_gemm){.m = m,
                                                      .k = w->k,
                                                      .a = codes->q + row * w->k,
                                                      .tile_rows = t->kernels->tiling(bits, m).rows,
                                                      .sums = codes->sums + row * sums_pitch,
                                                      .sums_pitch = sums_pitch,
                                                      .panels = count,
                                                      .panel = panel,
                                                      .c = s->acc,
                                                      .c_pitch = c_pitch,
                                                      .scratch = s->gemm});
    for (int64_t i = 0; i < count; i++)
        t->kernels->scale_rows(&(kt_outputs){.m = m,
                                             .unit = (float)unit,
                                             .token_scale = codes->scale + row,
                                             .acc = s->acc + i * c_pitch,
                                             .row_scale = (const float *)w->scales + (first + i) * KT_PANEL_ROWS,
                                             .out = c + i * m * KT_PANEL_ROWS,
                                             .out_pitch = KT_PANEL_ROWS});
}

void kt_transpose_columns(const kt_training *t, int64_t bucket, int64_t slice, int projection, int64_t first,
                          int64_t count, uint16_t *panels, const kt_train_scratch *s) {
    kt_matrix w = kt_get_matrix(t, bucket, slice, projection);
    if (!t->moe->transposed) kt_transpose_panels(t->kernels, &w, first * KT_PANEL_ROWS, count, panels, s->chunk);
}

void kt_multiply_transposed(const kt_training *t, const kt_range *block, int64_t slice, int projection, int64_t first,
                            int64_t count, const uint16_t *panels, const uint16_t *rows, int64_t pitch,
                            const kt_int8_rows *codes, float *c, const kt_train_scratch *s) {
    int64_t k = projection == KT_PROJECTION_DOWN ? t->moe->hidden : t->moe->width[slice];
    if (!t->moe->transposed) {
        kt_multiply_bf16(t->kernels, bf16_format(), panels, NULL, k, 0, count, rows, pitch, block->count, c, s->gemm);
        return;
    }
    kt_matrix w = get_matrix(t, t->moe->transposed, block->bucket, slice, projection);
    w.n = w.k;
    w.k = k;
    kt_multiply_block(t, block, &w, first, count, rows, pitch, codes, c, s);
}

void kt_project_inputs(const kt_training *t, int projection, int64_t expert, int64_t column, int64_t k,
                       const uint16_t *rows, int64_t pitch, int64_t row, int64_t m, uint16_t *rank_rows,
                       const kt_train_scratch *s) {
    if (t->lora->dropout > 0) {
        for (int64_t i = 0; i < m; i++) {
            memcpy(s->transposed + i * k, rows + i * pitch, (size_t)k * sizeof *rows);
            kt_drop_inputs(t, projection, row + i, column, k, s->transposed + i * k);
        }
        rows = s->transposed;
        pitch = k;
    }
    kt_project_to_rank(t, (kt_factor){0, projection}, expert, column, k, rows, pitch, m, rank_rows, s);
}
