/* The formats of experts in a forward: a row for each KTQ_FORMAT_* (formats.c). */
#ifndef KT_FORMATS_H
#define KT_FORMATS_H

#include "kernels.h"

/* moe.h */
typedef struct kt_arithmetic kt_arithmetic;
extern const kt_arithmetic kt_int8_arithmetic, kt_bf16_arithmetic;

typedef struct {
    const kt_arithmetic *arithmetic;
    const kt_geometry *geometry;
    int bits; /* bits of a code */
    /* scale_rows x scale_columns weights share a scale of scale_bytes bytes. scale_columns 0: whole rows share a scale.
     * scale_bytes 0: no scales. header_bytes precede the scales of each panel. */
    int64_t scale_rows, scale_columns, scale_bytes, header_bytes;
    kt_gemm_fn *(*gemm)(const kt_kernels *kernels); /* only for int8 arithmetic */
    /* Only for BF16 arithmetic: fields of kt_bf16_panel. */
    int coding;
    const uint16_t *values;
    kt_is_special_fn *is_special;
    kt_chunk_fn *chunk;
    const kt_integers *integers;
    kt_scales_fn *scale, *least;
    int64_t sum_columns; /* 0: scale_columns determine it */
    int two_terms;       /* 1: weights are sums of two terms; h has two terms if down is in such a format */
} kt_format;

enum { KT_MAX_SUM_COLUMNS = 128 };

/* sum_columns of kt_bf16_panel: the largest power of two that divides scale_columns, at most KT_MAX_SUM_COLUMNS. If it
 * is less than KT_SUM_COLUMNS (NVFP4: 16), `chunk` multiplies these scales into the weights, and the remaining scales
 * are those of whole rows, as if scale_columns were 0. */
static inline int64_t kt_sum_columns(const kt_format *format) {
    if (format->sum_columns) return format->sum_columns;
    int64_t power = format->scale_columns & -format->scale_columns;
    return power >= KT_SUM_COLUMNS && power < KT_MAX_SUM_COLUMNS ? power : KT_MAX_SUM_COLUMNS;
}

/* Whether a format multiplies activations that are rounded once for all panels (kt_round_units_fn), which lets AMX give
   the same sums as other instruction sets (gemm_int16_amx.c). */
static inline int kt_rounds_activations(const kt_format *format) {
    return format->integers && format->bits < 8 && kt_sum_columns(format) == KT_SUM_COLUMNS;
}

static inline int kt_terms(const kt_format *format) {
    return 1 + format->two_terms;
}

/* Returns NULL for an unknown number. */
const kt_format *kt_get_format(int format);

/* KTQ_OK if a weight can have these sizes, else KTQ_EINVAL or KTQ_ESHAPE. */
int kt_check_size(const kt_format *format, int64_t n, int64_t k);

/* Returns panel number `index` of a weight [n, k] for BF16 arithmetic. */
static inline kt_bf16_panel kt_get_bf16_panel(const kt_format *format, const void *codes, const void *scales, int64_t k,
                                              int64_t index) {
    int64_t row = index * KT_PANEL_ROWS;
    kt_bf16_panel panel = {.codes = (const uint8_t *)codes + row * k * format->bits / 8,
                           .scales = scales,
                           .bits = format->bits,
                           .terms = kt_terms(format),
                           .sum_columns = kt_sum_columns(format),
                           .coding = format->coding,
                           .values = format->values,
                           .is_special = format->is_special,
                           .chunk = format->chunk,
                           .integers = format->integers,
                           .scale = format->scale,
                           .least = format->least};
    if (format->integers)
        panel.scale_bytes = format->scale_bytes * KT_PANEL_ROWS * KT_SUM_COLUMNS / format->scale_columns;
    int64_t of_row = format->scale_columns ? k / format->scale_columns : 1;
    if (format->scale_bytes) /* skip the scales of the panels before */
        panel.scales += row / format->scale_rows * of_row * format->scale_bytes + index * format->header_bytes;
    return panel;
}

#endif
