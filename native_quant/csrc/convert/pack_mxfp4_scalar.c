/* The definition in C: section 9 of numerics.md, a row at a time. */
#include "bf16.h"
#include "kernels.h"
#include "pack_mxfp4.h"

/* In 1024ths: the values of the codes, and the middle between one and the next. */
static const int values[8] = {0, 512, 1024, 1536, 2048, 3072, 4096, 6144};
static const int middles[7] = {256, 768, 1280, 1792, 2560, 3584, 5120};

/* The code nearest to a number of 1024ths; a tie goes to the even one. */
static int nearest(int a) {
    int code = 0;
    for (int i = 0; i < 7; i++) code += i % 2 ? a >= middles[i] : a > middles[i];
    return code;
}

/* |x| 2^(127-e) in 512ths. What is lost is less than 1/4, and counts the same for every exponent. */
static int fixed_point(uint16_t x, int e) {
    float scale = kt_float((uint32_t)(254 - e) << 23);
    return (int)(kt_from_bf16(x & KT_BF16_MAGNITUDE) * scale * 512.0f);
}

/* Codes of 32 columns; returns their exponent. */
static uint8_t pack_row(const uint8_t *row, uint16_t amax, uint8_t *codes) {
    int e = (amax >> 7) - 2, error[2] = {0, 0};
    if (e < KT_MXFP4_LEAST) e = KT_MXFP4_LEAST;
    if (e > KT_MXFP4_MOST) e = KT_MXFP4_MOST;
    uint8_t nearest_codes[2][KT_GROUP_COLUMNS];
    for (int c = 0; c < KT_GROUP_COLUMNS; c++) {
        int a = fixed_point(kt_load16(row + 2 * c), e);
        int small = nearest(2 * a), large = nearest(a); /* a is 1024ths of half as much, too */
        int small_error = 2 * a - values[small], large_error = 2 * (a - values[large]);
        error[0] += small_error * small_error;
        error[1] += large_error * large_error;
        nearest_codes[0][c] = (uint8_t)small;
        nearest_codes[1][c] = (uint8_t)large;
    }
    int higher = error[0] > error[1] && e < KT_MXFP4_MOST;
    for (int c = 0; c < KT_GROUP_COLUMNS; c++)
        codes[c] = (uint8_t)(nearest_codes[higher][c] | (kt_load16(row + 2 * c) >> 12 & 8));
    return amax ? (uint8_t)(e + higher) : KT_MXFP4_ZERO_EXPONENT;
}

int kt_pack_mxfp4_scalar(const uint8_t *rows, int64_t row_stride, uint8_t *codes, uint8_t *exponents,
                         const kt_prefetch *prefetch) {
    (void)prefetch;
    for (int r = 0; r < KT_HALF_ROWS; r++) {
        const uint8_t *row = rows + r * row_stride;
        uint16_t amax = kt_amax_scalar(row, KT_GROUP_COLUMNS);
        if (amax >= KT_BF16_INFINITY) return 0;
        uint8_t of_row[KT_GROUP_COLUMNS];
        exponents[r] = pack_row(row, amax, of_row);
        for (int c = 0; c < KT_GROUP_COLUMNS; c += 8)
            for (int i = 0; i < 4; i++) { /* byte: columns i/2 + 4 (i%2) and 2 more */
                const uint8_t *low = of_row + c + i / 2 + i % 2 * 4;
                codes[c / 8 * 64 + 4 * r + i] = (uint8_t)(low[0] | low[2] << 4);
            }
    }
    return 1;
}
