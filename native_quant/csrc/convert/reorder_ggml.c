/* Blocks of ggml in panels of 32 rows: codes and scales stay what they are, and only their order changes (ktq.h). */
#include <string.h>

#include "ggml_blocks.h"
#include "kernels.h"
#include "panels.h"

enum { COLUMNS = 32 }; /* of a block of a panel */

/* A format of a panel: bits of a code, and bytes of scales for each `columns` columns of a row, which are those of a
   block or of half a block. */
typedef struct {
    int bits;
    int64_t columns, scale_bytes;
} layout;

static layout find_layout(int kind) {
    switch (kind) {
    case KTQ_Q4_0: return (layout){4, 32, 2 * KT_PANEL_ROWS};
    case KTQ_Q8_0: return (layout){8, 32, 2 * KT_PANEL_ROWS};
    case KTQ_Q4_K: return (layout){4, KTQ_K_COLUMNS, KTQ_K_SCALE_BYTES * KT_PANEL_ROWS};
    case KTQ_Q5_K: return (layout){5, KTQ_K_COLUMNS, KTQ_K_SCALE_BYTES * KT_PANEL_ROWS};
    case KTQ_Q6_K: return (layout){6, KTQ_K_COLUMNS, KTQ_Q6_K_SCALE_BYTES * KT_PANEL_ROWS};
    }
    return (layout){0, 1, 0};
}

/* The lowest 4 bits of 4 bytes that are 16 bits apart, side by side. */
static uint32_t narrow_codes(uint64_t codes) {
    codes &= 0x000f000f000f000f;
    codes = (codes | codes >> 12) & 0x000000ff000000ff;
    return (uint32_t)((codes | codes >> 24) & 0xffff);
}

/* 32 columns of row r of a block of 4 to 6 bits: nibbles as MXFP4's, then lines of their upper bits. A byte of such a
   line belongs to a byte of 2 (6 bits) or 4 lines: the bits of the first line's nibbles begin at bit 4. */
static void put_codes(int bits, const uint8_t codes[COLUMNS], int r, uint8_t *block) {
    uint8_t *half = block + r / KT_HALF_ROWS * (KT_HALF_ROWS * COLUMNS * bits / 8);
    for (int v = 0; v < 4; v++) {
        uint64_t eight;
        memcpy(&eight, codes + 8 * v, sizeof eight);
        uint32_t word = narrow_codes(eight) | narrow_codes(eight >> 8) << 16;
        memcpy(half + 64 * v + r % KT_HALF_ROWS * 4, &word, sizeof word);
    }
    const int more = bits - 4;
    uint8_t upper[2][4] = {0};
    for (int c = 0; c < COLUMNS; c++) {
        int v = c / 8, bit = (4 + 2 * more * v) % 8 + c / 2 % 2 * more;
        upper[v * more / 4][c % 2 * 2 + c % 8 / 4] |= (uint8_t)(codes[c] >> 4 << bit);
    }
    for (int w = 0; w < more; w++) memcpy(half + 256 + 64 * w + r % KT_HALF_ROWS * 4, upper[w], sizeof upper[w]);
}

static void put_bytes(const int8_t codes[COLUMNS], int r, uint8_t *block) {
    uint8_t *half = block + r / KT_HALF_ROWS * KT_HALF_ROWS * COLUMNS;
    for (int c = 0; c < COLUMNS; c++) half[c / 2 * 2 * KT_HALF_ROWS + r % KT_HALF_ROWS * 2 + c % 2] = (uint8_t)codes[c];
}

static void put_q4_0(const kt_q4_0 *from, int r, uint8_t *codes, uint8_t *scales) {
    uint8_t values[COLUMNS];
    for (int j = 0; j < 16; j++) { /* less 8, in two's complement */
        values[j] = (from->q[j] & 15) ^ 8;
        values[j + 16] = from->q[j] >> 4 ^ 8;
    }
    put_codes(4, values, r, codes);
    memcpy(scales + 2 * r, from->d, 2);
}

static void put_q8_0(const kt_q8_0 *from, int r, uint8_t *codes, uint8_t *scales) {
    put_bytes(from->q, r, codes);
    memcpy(scales + 2 * r, from->d, 2);
}

enum { GROUPS = KTQ_K_COLUMNS / COLUMNS }; /* of half a block of K types */

/* Groups first .. of a kt_q5_k if high is not NULL, else of a kt_q4_k. */
static void put_k(const kt_q4_k *from, const uint8_t *high, const uint8_t *q, int first, int r, uint8_t *codes,
                  uint8_t *scales) {
    int bits = high ? 5 : 4;
    const uint8_t *packed = from->scales;
    memcpy(scales + 2 * r, from->d, 2);
    memcpy(scales + 2 * KT_PANEL_ROWS + 2 * r, from->least, 2);
    scales += 4 * KT_PANEL_ROWS + r;
    for (int i = 0; i < GROUPS; i++, codes += KT_PANEL_ROWS * COLUMNS * bits / 8) {
        int g = first + i;
        uint8_t values[COLUMNS];
        for (int j = 0; j < COLUMNS; j++) {
            values[j] = q[g / 2 * 32 + j] >> g % 2 * 4 & 15;
            if (high) values[j] |= (uint8_t)((high[j] >> g & 1) << 4);
        }
        put_codes(bits, values, r, codes);
        int scale = g < 4 ? packed[g] & 63 : (packed[g + 4] & 15) | packed[g - 4] >> 6 << 4;
        int least = g < 4 ? packed[g + 4] & 63 : packed[g + 4] >> 4 | packed[g] >> 6 << 4;
        scales[i * KT_PANEL_ROWS] = (uint8_t)scale;
        scales[(GROUPS + i) * KT_PANEL_ROWS] = (uint8_t)least;
    }
}

static void put_q6_k(const kt_q6_k *from, int first, int r, uint8_t *codes, uint8_t *scales) {
    memcpy(scales + 2 * r, from->d, 2);
    for (int i = 0; i < 2 * GROUPS; i++)
        scales[(2 + i) * KT_PANEL_ROWS + r] = (uint8_t)from->scales[2 * first + i];
    for (int g = first; g < first + GROUPS; g++, codes += KT_PANEL_ROWS * COLUMNS * 6 / 8) {
        uint8_t values[COLUMNS];
        for (int j = 0; j < COLUMNS; j++)
            values[j] = (uint8_t)((from->low[g / 4 * 64 + g % 2 * 32 + j] >> g % 4 / 2 * 4 & 15) |
                                  (from->high[g / 4 * 32 + j] >> 2 * (g % 4) & 3) << 4);
        put_codes(6, values, r, codes);
    }
}

/* A block, or of K types its groups first .. */
static void put_block(int kind, const uint8_t *block, int first, int r, uint8_t *codes, uint8_t *scales) {
    switch (kind) {
    case KTQ_Q4_0: put_q4_0((const kt_q4_0 *)block, r, codes, scales); break;
    case KTQ_Q8_0: put_q8_0((const kt_q8_0 *)block, r, codes, scales); break;
    case KTQ_Q4_K: put_k((const kt_q4_k *)block, NULL, ((const kt_q4_k *)block)->q, first, r, codes, scales); break;
    case KTQ_Q5_K: {
        const kt_q5_k *q5_k = (const kt_q5_k *)block;
        put_k((const kt_q4_k *)block, q5_k->high, q5_k->q, first, r, codes, scales);
        break;
    }
    case KTQ_Q6_K: put_q6_k((const kt_q6_k *)block, first, r, codes, scales); break;
    }
}

int ktq_reorder_ggml(int kind, int64_t n, int64_t k, int64_t skip, const uint8_t *rows, int64_t row_stride,
                     uint8_t *codes, uint8_t *scales, int64_t *bad_row) {
    const layout layout = find_layout(kind);
    const kt_block size = kt_get_block(kind);
    if (!layout.bits || !rows || !codes || !scales || !bad_row || skip < 0) return KTQ_EINVAL;
    if (n < 1 || k < 1 || n % KT_PANEL_ROWS || k % layout.columns || skip % layout.columns) return KTQ_ESHAPE;
    if (row_stride < (skip + k + size.columns - 1) / size.columns * size.bytes) return KTQ_EINVAL;
    for (int64_t row = 0; row < n; row += KT_PANEL_ROWS)
        for (int64_t c = skip; c < skip + k; c += layout.columns) {
            const uint8_t *block = rows + row * row_stride + c / size.columns * size.bytes;
            for (int r = 0; r < KT_PANEL_ROWS; r++, block += row_stride) {
                if (!kt_has_finite_scales(kind, block)) {
                    *bad_row = row + r;
                    return KTQ_ENONFINITE;
                }
                put_block(kind, block, (int)(c % size.columns / COLUMNS), r, codes, scales);
            }
            codes += layout.columns * KT_PANEL_ROWS * layout.bits / 8;
            scales += layout.scale_bytes;
        }
    *bad_row = -1;
    return KTQ_OK;
}
