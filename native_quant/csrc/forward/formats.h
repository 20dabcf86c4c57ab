/* The formats of experts that a forward computes with: a row for each KTQ_FORMAT_* (formats.c). */
#ifndef KT_FORMATS_H
#define KT_FORMATS_H

#include "kernels.h"

/* moe.h: in int8 or in BF16. */
typedef struct kt_arithmetic kt_arithmetic;
extern const kt_arithmetic kt_int8_arithmetic, kt_bf16_arithmetic;

typedef struct {
    const kt_arithmetic *arithmetic;
    const kt_geometry *geometry;
    int bits; /* of a code */
    /* scale_rows x scale_columns weights share a scale of scale_bytes bytes. 0 columns: a whole row does; 0 bytes:
     * there are no scales. header_bytes precede the scales of each panel. */
    int64_t scale_rows, scale_columns, scale_bytes, header_bytes;
    kt_gemm_fn *(*gemm)(const kt_kernels *kernels); /* int8 arithmetic */
    kt_chunk_fn *chunk, *integers;                  /* BF16 arithmetic: kt_bf16_panel's */
    kt_scales_fn *scale, *least;
    int64_t sum_columns; /* kt_bf16_panel's, where scale_columns do not say it; else 0 */
    int two_terms;       /* 1: kt_bf16_panel's terms are 2, and h has as many where down is so; else 0 */
} kt_format;

enum { KT_MOST_SUM_COLUMNS = 128 };

/* kt_bf16_panel's sum_columns: the largest power of two that divides the columns of a scale, but not more than a sum
 * can have. Where that is less than KT_SUM_COLUMNS (NVFP4: 16), `chunk` multiplies these scales into the weights, and
 * those that it leaves are of the whole row, as where there are no columns. */
static inline int64_t kt_sum_columns(const kt_format *format) {
    if (format->sum_columns) return format->sum_columns;
    int64_t power = format->scale_columns & -format->scale_columns;
    return power >= KT_SUM_COLUMNS && power < KT_MOST_SUM_COLUMNS ? power : KT_MOST_SUM_COLUMNS;
}

static inline int kt_terms(const kt_format *format) {
    return 1 + format->two_terms;
}

/* NULL: there is none of this number. */
const kt_format *kt_format_of(int format);

/* KTQ_OK if a weight can have these sizes, else KTQ_EINVAL or KTQ_ESHAPE. */
int kt_check_size(const kt_format *format, int64_t n, int64_t k);

/* Panel number `index` of a weight [n, k] for BF16 arithmetic. */
static inline kt_bf16_panel kt_bf16_panel_of(const kt_format *format, const void *codes, const void *scales,
                                             int64_t k, int64_t index) {
    int64_t row = index * KT_PANEL_ROWS;
    kt_bf16_panel panel = {(const uint8_t *)codes + row * k * format->bits / 8, scales, format->bits,
                           kt_terms(format), kt_sum_columns(format), format->chunk, format->integers,
                           format->scale, format->least};
    int64_t of_row = format->scale_columns ? k / format->scale_columns : 1;
    if (format->scale_bytes) /* whole rows of scales come before it */
        panel.scales += row / format->scale_rows * of_row * format->scale_bytes + index * format->header_bytes;
    return panel;
}

#endif
