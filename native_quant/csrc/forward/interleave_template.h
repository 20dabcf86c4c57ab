/* Pairs of rows to the lines of a panel of BF16: two vectors of pairs at a time, or one of scaled ones. */
#include "bf16_template.h"

TARGET static inline uint16_t *panel_line(uint16_t *line, int64_t c) {
    return line + c / KT_HALF_ROWS * (KT_HALF_BYTES / 2) + c % KT_HALF_ROWS * 2;
}

__attribute__((always_inline)) TARGET static inline floats numbers(int item_bytes, const uint8_t *row) {
    return item_bytes == 1 ? cvtepi32_ps(load_epi8_epi32(row)) : castsi_ps(slli_epi32(load_epu16_epi32(row), 16));
}

__attribute__((always_inline)) TARGET static inline void
scaled(int item_bytes, const uint8_t *rows, int64_t row_stride, const float *scale, uint16_t *line) {
    for (int64_t c = 0; c < KT_PANEL_ROWS; c += LANES) {
        floats first = mul_ps(numbers(item_bytes, rows + c * item_bytes), set1_ps(scale[0]));
        floats second = mul_ps(numbers(item_bytes, rows + row_stride + c * item_bytes), set1_ps(scale[1]));
        ints above = and_si(round_numbers_to_bf16(second), set1_epi32(0xffff0000));
        storeu_si(panel_line(line, c), or_si(to_bf16(first), above));
    }
}

TARGET void KERNEL_OF(interleave)(int item_bytes, const uint8_t *rows, int64_t row_stride, int64_t pairs,
                                  const float *scale, int64_t at, uint16_t *panel) {
    for (int64_t i = 0; i < pairs; i++, rows += 2 * row_stride) {
        uint16_t *line = kt_panel_line(panel, at + i);
        if (item_bytes == 1) scaled(1, rows, row_stride, scale + 2 * i, line);
        else if (scale) scaled(2, rows, row_stride, scale + 2 * i, line);
        else
            for (int64_t c = 0; c < KT_PANEL_ROWS; c += 2 * LANES) {
                ints first = before_unpack(loadu_si(rows + 2 * c));
                ints second = before_unpack(loadu_si(rows + row_stride + 2 * c));
                storeu_si(panel_line(line, c), unpacklo_epi16(first, second));
                storeu_si(panel_line(line, c + LANES), unpackhi_epi16(first, second));
            }
    }
}
