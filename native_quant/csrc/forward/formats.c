#include "formats.h"

#include <string.h>

#include "bf16.h"

static kt_gemm_fn *gemm_int4(const kt_kernels *kernels) {
    return kernels->gemm_int4;
}

static kt_gemm_fn *gemm_int8(const kt_kernels *kernels) {
    return kernels->gemm_int8;
}

/* BF16 value of each 4-bit code: E2M1, twice E2M1, integers in two's complement, unsigned integers. */
static const uint16_t e2m1[16] = {0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                  0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
static const uint16_t twice_e2m1[16] = {0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40c0, 0x4100, 0x4140,
                                        0x8000, 0xbf80, 0xc000, 0xc040, 0xc080, 0xc0c0, 0xc100, 0xc140};
static const uint16_t int4[16] = {0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                  0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
static const uint16_t uint4[16] = {0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                   0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};

static void chunk_nibbles(const kt_kernels *kernels, const kt_bf16_panel *panel, int64_t first, int64_t columns,
                          uint16_t *chunk) {
    kernels->chunk_nibbles(panel->values, panel->codes + first * KT_PANEL_ROWS / 2, columns, chunk);
}

/* Whether an E8M0 scale is 0, which is 2^-127 and not a normal number. Their number is `columns`: one for each of 32
   rows and 32 columns. */
static int has_zero_scale(const kt_bf16_panel *panel, int64_t first, int64_t columns) {
    return memchr(panel->scales + first, 0, (size_t)columns) != NULL;
}

/* Halves the weights whose E8M0 scale is 0; scales_e8m0 returns 2^-126 for it. Halving is exact. */
static void halve_weights(const uint8_t *scales, int64_t columns, uint16_t *chunk) {
    for (int64_t i = 0; i < columns; i++) {
        if (scales[i]) continue;
        uint16_t *half = chunk + i / 32 * 32 * KT_SUM_COLUMNS + i % 32 / KT_HALF_ROWS * KT_HALF_BYTES / 2;
        for (int64_t j = 0; j < KT_SUM_COLUMNS; j++) {
            uint16_t *weight = half + j / 2 * 32 + i % KT_HALF_ROWS * 2 + j % 2;
            if (*weight & KT_BF16_MAGNITUDE) *weight -= 1 << 7;
        }
    }
}

static void scales_e8m0(const kt_kernels *kernels, const kt_bf16_panel *panel, int64_t first, int64_t columns,
                        float *scale) {
    const uint8_t *scales = panel->scales + first;
    kernels->widen_scales(KT_E8M0_SCALES, scales, columns, scale);
    if (!has_zero_scale(panel, first, columns)) return;
    for (int64_t i = 0; i < columns; i++)
        if (!scales[i]) scale[i] = 0x1p-126f;
}

/* The scales of twice the values. */
static void scales_mxfp4(const kt_kernels *kernels, const kt_bf16_panel *panel, int64_t first, int64_t columns,
                         float *scale) {
    kernels->widen_scales(KT_HALF_E8M0_SCALES, panel->scales + first, columns, scale);
}

static void integers_mxfp4(const kt_kernels *kernels, const kt_bf16_panel *panel, int64_t first, int64_t columns,
                           uint16_t *chunk) {
    static const int16_t twice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    kernels->chunk_nibbles((const uint16_t *)twice, panel->codes + first * KT_PANEL_ROWS / 2, columns, chunk);
}

static void chunk_fp8(const kt_kernels *kernels, const kt_bf16_panel *panel, int64_t first, int64_t columns,
                      uint16_t *chunk) {
    kernels->chunk_fp8(panel->codes + first * KT_PANEL_ROWS, columns, chunk);
}

static void chunk_mxfp8(const kt_kernels *kernels, const kt_bf16_panel *panel, int64_t first, int64_t columns,
                        uint16_t *chunk) {
    chunk_fp8(kernels, panel, first, columns, chunk);
    if (has_zero_scale(panel, first, columns)) halve_weights(panel->scales + first, columns, chunk);
}

/* A panel's scales begin with the scale of the whole weight. Codes times the scales of 16 columns are exact in BF16. */
static void chunk_nvfp4(const kt_kernels *kernels, const kt_bf16_panel *panel, int64_t first, int64_t columns,
                        uint16_t *chunk) {
    const uint8_t *scales = panel->scales + KTQ_NVFP4_HEADER + 2 * first;
    uint16_t groups[2 * KT_CHUNK_COLUMNS];
    chunk_nibbles(kernels, panel, first, columns, chunk);
    kernels->decode(KTQ_FP8_E4M3, scales, 0, 1, 2 * columns, 1, groups, 0);
    kernels->scale_chunk(groups, columns, chunk);
}

/* float32 scales for each row and sum_columns columns. */
static void scales_gptq(const kt_kernels *kernels, const kt_bf16_panel *panel, int64_t first, int64_t columns,
                        float *scale) {
    const size_t row_scales = KT_PANEL_ROWS * sizeof *scale;
    (void)kernels;
    for (int64_t j = 0; j < columns; j += KT_SUM_COLUMNS)
        memcpy(scale + j, panel->scales + (first + j) / panel->sum_columns * (int64_t)row_scales, row_scales);
}

static void scales_bf16(const kt_kernels *kernels, const kt_bf16_panel *panel, int64_t first, int64_t columns,
                        float *scale) {
    kernels->widen_scales(KT_BF16_SCALES, panel->scales + 2 * first, columns, scale);
}

/* Writes a scale for 32 rows and some columns, four times at once. */
static void repeat_scale(const uint8_t *scale, int64_t columns, float *out) {
    float one;
    memcpy(&one, scale, sizeof one);
    const float four[4] = {one, one, one, one};
    for (int64_t i = 0; i < columns; i += 4) memcpy(out + i, four, sizeof four);
}

/* One scale for 128 columns and all rows. */
static void scales_fp8(const kt_kernels *kernels, const kt_bf16_panel *panel, int64_t first, int64_t columns,
                       float *scale) {
    (void)kernels;
    for (int64_t end = first + columns, count; first < end; first += count, scale += count) {
        count = 128 - first % 128 < end - first ? 128 - first % 128 : end - first;
        repeat_scale(panel->scales + first / 128 * (int64_t)sizeof *scale, count, scale);
    }
}

static void scales_rows(const kt_kernels *kernels, const kt_bf16_panel *panel, int64_t first, int64_t columns,
                        float *scale) {
    (void)kernels, (void)first;
    for (int64_t i = 0; i < columns; i += KT_PANEL_ROWS)
        memcpy(scale + i, panel->scales, KT_PANEL_ROWS * sizeof *scale);
}

static void scales_weight(const kt_kernels *kernels, const kt_bf16_panel *panel, int64_t first, int64_t columns,
                          float *scale) {
    (void)kernels, (void)first;
    repeat_scale(panel->scales, columns, scale);
}

/* FP16 for each row and 32 columns. */
static void scales_f16(const kt_kernels *kernels, const kt_bf16_panel *panel, int64_t first, int64_t columns,
                       float *scale) {
    kernels->half_scales(panel->scales + 2 * first, NULL, columns / KT_SUM_COLUMNS, scale);
}

static const uint8_t *get_codes(const kt_bf16_panel *panel, int64_t first) {
    return panel->codes + first * KT_PANEL_ROWS * panel->bits / 8;
}

static void chunk_integers(const kt_kernels *kernels, const kt_bf16_panel *panel, int64_t first, int64_t columns,
                           uint16_t *chunk) {
    kernels->chunk_integers(panel->bits, get_codes(panel, first), NULL, columns, chunk);
}

/* Codes in two's complement. */
static void integers(const kt_kernels *kernels, const kt_bf16_panel *panel, int64_t first, int64_t columns,
                     uint16_t *chunk) {
    kernels->chunk_int16(panel->bits, 1, get_codes(panel, first), NULL, columns, (int16_t *)chunk);
}

static void integers_k(const kt_kernels *kernels, const kt_bf16_panel *panel, int64_t first, int64_t columns,
                       uint16_t *chunk) {
    kernels->chunk_int16(panel->bits, 0, get_codes(panel, first), NULL, columns, (int16_t *)chunk);
}

enum { K_GROUPS = KTQ_K_COLUMNS / KT_SUM_COLUMNS, HALVES = 2 * KT_PANEL_ROWS };

/* Scales of at most `columns` columns from `first` on, within one unit of KTQ_K_COLUMNS columns. */
typedef struct {
    const uint8_t *scales;
    int64_t column, columns; /* first column in the unit, and number of columns */
} k_unit;

static k_unit find_k_unit(const kt_bf16_panel *panel, int64_t bytes, int64_t first, int64_t columns) {
    int64_t column = first % KTQ_K_COLUMNS, remaining = KTQ_K_COLUMNS - column;
    return (k_unit){panel->scales + first / KTQ_K_COLUMNS * bytes * KT_PANEL_ROWS, column,
                    columns < remaining ? columns : remaining};
}

/* Q4_K and Q5_K: reads scales (are_least 0) or least values (1). */
static void k_scales(int are_least, const kt_kernels *kernels, const kt_bf16_panel *panel, int64_t first,
                     int64_t columns, float *out) {
    for (int64_t end = first + columns; first < end;) {
        k_unit unit = find_k_unit(panel, KTQ_K_SCALE_BYTES, first, end - first);
        int64_t group = are_least * K_GROUPS + unit.column / KT_SUM_COLUMNS;
        kernels->half_scales(unit.scales + are_least * HALVES, unit.scales + 2 * HALVES + group * KT_PANEL_ROWS,
                             unit.columns / KT_SUM_COLUMNS, out);
        first += unit.columns;
        out += unit.columns; /* the number of scales equals that of columns (32 rows, 32 columns) */
    }
}

static void scales_k(const kt_kernels *kernels, const kt_bf16_panel *panel, int64_t first, int64_t columns,
                     float *scale) {
    k_scales(0, kernels, panel, first, columns, scale);
}

static void least_k(const kt_kernels *kernels, const kt_bf16_panel *panel, int64_t first, int64_t columns,
                    float *least) {
    k_scales(1, kernels, panel, first, columns, least);
}

/* The factors of 16 columns each, which multiply the codes. */
static const uint8_t *q6_k_factors(const k_unit *unit) {
    return unit->scales + HALVES + unit->column / 16 * KT_PANEL_ROWS;
}

static void integers_q6_k(const kt_kernels *kernels, const kt_bf16_panel *panel, int64_t first, int64_t columns,
                          uint16_t *chunk) {
    for (int64_t end = first + columns; first < end;) {
        k_unit unit = find_k_unit(panel, KTQ_Q6_K_SCALE_BYTES, first, end - first);
        kernels->chunk_int16(6, 1, get_codes(panel, first), q6_k_factors(&unit), unit.columns, (int16_t *)chunk);
        first += unit.columns;
        chunk += unit.columns * KT_PANEL_ROWS;
    }
}

/* The products are rounded to BF16. */
static void chunk_q6_k(const kt_kernels *kernels, const kt_bf16_panel *panel, int64_t first, int64_t columns,
                       uint16_t *chunk) {
    uint16_t groups[KTQ_K_COLUMNS / 16 * KT_PANEL_ROWS];
    for (int64_t end = first + columns; first < end;) {
        k_unit unit = find_k_unit(panel, KTQ_Q6_K_SCALE_BYTES, first, end - first);
        kernels->chunk_integers(8, q6_k_factors(&unit), NULL, unit.columns / 16, groups);
        kernels->chunk_integers(6, get_codes(panel, first), groups, unit.columns, chunk);
        first += unit.columns;
        chunk += unit.columns * KT_PANEL_ROWS;
    }
}

static void scales_q6_k(const kt_kernels *kernels, const kt_bf16_panel *panel, int64_t first, int64_t columns,
                        float *scale) {
    for (int64_t end = first + columns; first < end; first += KT_SUM_COLUMNS, scale += KT_SUM_COLUMNS)
        kernels->half_scales(find_k_unit(panel, KTQ_Q6_K_SCALE_BYTES, first, KT_SUM_COLUMNS).scales, NULL, 1, scale);
}

static void chunk_f16(const kt_kernels *kernels, const kt_bf16_panel *panel, int64_t first, int64_t columns,
                      uint16_t *chunk) {
    kernels->chunk_halves(get_codes(panel, first), columns, chunk);
}

/* Twice E2M1, plus 12. */
static const uint8_t mxfp4_values[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

static const kt_integers unsigned_integers = {integers_k, 0, 0, NULL}, signed_integers = {integers, 8, 0, NULL},
                         bytes = {integers, 0, 0, NULL}, scaled_integers = {integers_q6_k, 32, 1, NULL},
                         twice_mxfp4 = {integers_mxfp4, 12, 0, mxfp4_values};

static const kt_geometry by_32 = {32, 32, 1}, by_64 = {64, 64, 1}, by_128 = {128, 128, 1},
                          by_k = {32, KTQ_K_COLUMNS, 1};

static const kt_format formats[] = {
    [KTQ_FORMAT_AMXINT4] = {&kt_int8_arithmetic, &kt_geometries[4], 4, 1, 0, sizeof(float), .gemm = gemm_int4},
    [KTQ_FORMAT_AMXINT8] = {&kt_int8_arithmetic, &kt_geometries[8], 8, 1, 0, sizeof(float), .gemm = gemm_int8},
    [KTQ_FORMAT_MXFP4] = {&kt_bf16_arithmetic, &by_64, 4, 1, 32, sizeof(uint8_t), .values = twice_e2m1,
                          .chunk = chunk_nibbles, .integers = &twice_mxfp4, .scale = scales_mxfp4},
    [KTQ_FORMAT_FP8] = {&kt_bf16_arithmetic, &by_128, 8, 128, 128, sizeof(float), .coding = KT_E4M3,
                        .chunk = chunk_fp8, .scale = scales_fp8},
    [KTQ_FORMAT_BF16] = {&kt_bf16_arithmetic, &by_32, 16, 1, .coding = KT_BF16_CODES},
    [KTQ_FORMAT_FP8_PERCHANNEL] = {&kt_bf16_arithmetic, &by_32, 8, 1, 0, sizeof(float), .coding = KT_E4M3,
                                   .chunk = chunk_fp8, .scale = scales_rows},
    [KTQ_FORMAT_MXFP8] = {&kt_bf16_arithmetic, &by_32, 8, 1, 32, sizeof(uint8_t), .coding = KT_E4M3,
                          .is_special = has_zero_scale, .chunk = chunk_mxfp8, .scale = scales_e8m0},
    [KTQ_FORMAT_NVFP4] = {&kt_bf16_arithmetic, &by_64, 4, 1, 16, 1, KTQ_NVFP4_HEADER, .values = e2m1,
                          .chunk = chunk_nvfp4, .scale = scales_weight},
    [KTQ_FORMAT_RAWINT4] = {&kt_bf16_arithmetic, &by_32, 4, 1, 32, sizeof(uint16_t), .values = int4,
                            .chunk = chunk_nibbles, .integers = &signed_integers, .scale = scales_bf16},
    [KTQ_FORMAT_GPTQ_INT4] = {&kt_bf16_arithmetic, &by_128, 4, 1, 128, sizeof(float), .values = int4,
                              .chunk = chunk_nibbles, .integers = &signed_integers, .scale = scales_gptq},
    [KTQ_FORMAT_GPTQ_INT4_64] = {&kt_bf16_arithmetic, &by_64, 4, 1, 64, sizeof(float), .values = int4,
                                 .chunk = chunk_nibbles, .integers = &signed_integers, .scale = scales_gptq},
    [KTQ_FORMAT_GPTQ_INT4_32] = {&kt_bf16_arithmetic, &by_32, 4, 1, 32, sizeof(float), .values = int4,
                                 .chunk = chunk_nibbles, .integers = &signed_integers, .scale = scales_gptq},
    [KTQ_FORMAT_Q4_0] = {&kt_bf16_arithmetic, &by_32, 4, 1, 32, sizeof(uint16_t), .values = int4,
                         .chunk = chunk_nibbles, .integers = &signed_integers, .scale = scales_f16},
    [KTQ_FORMAT_Q8_0] = {&kt_bf16_arithmetic, &by_32, 8, 1, 32, sizeof(uint16_t), .chunk = chunk_integers,
                         .integers = &bytes, .scale = scales_f16},
    [KTQ_FORMAT_Q4_K] = {&kt_bf16_arithmetic, &by_k, 4, 1, KTQ_K_COLUMNS, KTQ_K_SCALE_BYTES, .values = uint4,
                         .chunk = chunk_nibbles, .integers = &unsigned_integers, .scale = scales_k, .least = least_k,
                         .sum_columns = KT_SUM_COLUMNS},
    [KTQ_FORMAT_Q5_K] = {&kt_bf16_arithmetic, &by_k, 5, 1, KTQ_K_COLUMNS, KTQ_K_SCALE_BYTES, .chunk = chunk_integers,
                         .integers = &unsigned_integers, .scale = scales_k, .least = least_k,
                         .sum_columns = KT_SUM_COLUMNS},
    [KTQ_FORMAT_Q6_K] = {&kt_bf16_arithmetic, &by_k, 6, 1, KTQ_K_COLUMNS, KTQ_Q6_K_SCALE_BYTES, .chunk = chunk_q6_k,
                         .integers = &scaled_integers, .scale = scales_q6_k, .sum_columns = KT_SUM_COLUMNS},
    [KTQ_FORMAT_F16] = {&kt_bf16_arithmetic, &by_32, 16, 1, .chunk = chunk_f16, .two_terms = 1},
};
enum { FORMATS = sizeof formats / sizeof formats[0] };

const kt_format *kt_get_format(int format) {
    return format >= 0 && format < FORMATS ? &formats[format] : NULL;
}

int kt_check_size(const kt_format *format, int64_t n, int64_t k) {
    if (n <= 0 || k <= 0 || n > KTQ_MAX_COLUMNS || k > KTQ_MAX_COLUMNS) return KTQ_EINVAL;
    return n % format->geometry->block_rows || k % format->geometry->tile_columns ? KTQ_ESHAPE : KTQ_OK;
}

int ktq_weight_bytes(int format, int64_t n, int64_t k, int64_t *codes, int64_t *scales) {
    const kt_format *row = kt_get_format(format);
    int error = row && codes && scales ? kt_check_size(row, n, k) : KTQ_EINVAL;
    if (error) return error;
    int64_t of_row = row->scale_columns ? k / row->scale_columns : 1;
    *codes = n * k * row->bits / 8;
    *scales = n / row->scale_rows * of_row * row->scale_bytes + n / KT_PANEL_ROWS * row->header_bytes;
    return KTQ_OK;
}
