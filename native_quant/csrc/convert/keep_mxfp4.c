/* Sources that have the numbers of MXFP4, E2M1 codes with an E8M0 scale for each 32 columns: codes and exponents stay,
 * and only their order changes. */
#include "bf16.h"
#include "ggml_blocks.h"
#include "kernels.h"
#include "strips.h"

enum { ROW_BYTES = KT_GROUP_COLUMNS / 2, NO_EXPONENT = 256 };

int kt_has_mxfp4(const ktq_source *source) {
    if (source->kind == KTQ_GGML_MXFP4) return source->skip % KT_GROUP_COLUMNS == 0;
    return source->kind == KTQ_FP4_E2M1 && source->skip % 2 == 0 && source->block_columns == KT_GROUP_COLUMNS &&
           source->first_column % KT_GROUP_COLUMNS == 0;
}

/* Of a float32 scale that is 2^(e-127), e; else NO_EXPONENT. */
static int exponent_of(float scale) {
    uint32_t bits = kt_bits(scale);
    if (bits == 0x400000) return 0; /* 2^-127, subnormal */
    return bits & 0x807fffff || bits == 0 ? NO_EXPONENT : (int)(bits >> 23);
}

/* Whether all magnitudes of 16 codes are at most `largest`. */
static int are_at_most(uint64_t codes, unsigned largest) {
    for (; codes; codes >>= 4)
        if ((codes & 7) > largest) return 0;
    return 1;
}

/* Whether 32 codes with this exponent are numbers, and finite: 6 * 2^126, 4 * 2^126 and 2 * 2^127 are not. */
static int are_finite(const uint64_t codes[2], int e) {
    unsigned largest = e < 253 ? 7 : e == 253 ? 5 : 3;
    return e != 255 && (e < 253 || (are_at_most(codes[0], largest) && are_at_most(codes[1], largest)));
}

/* Nibbles 0, 2, 4 and 6 of each word of 32 bits to its lower half, the others to its upper half. */
static uint64_t in_words(uint64_t codes) {
    uint64_t even = codes & 0x0f0f0f0f0f0f0f0f, odd = codes >> 4 & 0x0f0f0f0f0f0f0f0f;
    even = (even | even >> 4) & 0x00ff00ff00ff00ff;
    odd = (odd | odd >> 4) & 0x00ff00ff00ff00ff;
    even = (even | even >> 8) & 0x0000ffff0000ffff;
    odd = (odd | odd >> 8) & 0x0000ffff0000ffff;
    return even | odd << 16;
}

/* Block b of a row: its 32 codes in the order of the columns, low bits first; returns its exponent. */
static int load_block(const ktq_source *source, int64_t r, int64_t b, uint64_t codes[2]) {
    const uint8_t *row = (const uint8_t *)source->values + r * source->row_stride;
    if (source->kind == KTQ_FP4_E2M1) {
        memcpy(codes, row + source->skip / 2 + b * ROW_BYTES, ROW_BYTES);
        int64_t scales = (source->first_row + r) / source->block_rows * source->scales_per_row;
        return exponent_of(source->scales[scales + source->first_column / KT_GROUP_COLUMNS + b]);
    }
    const kt_ggml_mxfp4 *block = (const kt_ggml_mxfp4 *)row + source->skip / KT_GROUP_COLUMNS + b;
    uint64_t nibbles[2]; /* each byte: a column of the first 16, and of the last */
    memcpy(nibbles, block->q, ROW_BYTES);
    for (int upper = 0; upper < 2; upper++) {
        codes[upper] = 0;
        for (int i = 0; i < 2; i++) {
            uint64_t eight = nibbles[i] >> 4 * upper & 0x0f0f0f0f0f0f0f0f;
            eight = (eight | eight >> 4) & 0x00ff00ff00ff00ff;
            eight = (eight | eight >> 8) & 0x0000ffff0000ffff;
            codes[upper] |= (uint32_t)(eight | eight >> 16) * (uint64_t)1 << 32 * i;
        }
    }
    return block->e;
}

int kt_keep_mxfp4(const ktq_source *source, int64_t n, int64_t k, uint8_t *codes, uint8_t *exponents,
                  int64_t *bad_row) {
    int64_t worst = n;
    for (int64_t first = 0; first < n; first += KT_STRIP_ROWS)
        for (int64_t b = 0; b < k / KT_GROUP_COLUMNS; b++)
            for (int64_t r = first; r < first + KT_STRIP_ROWS; r++) {
                uint64_t columns[2], words;
                int e = load_block(source, r, b, columns);
                if (e == NO_EXPONENT) return 0;
                if (!are_finite(columns, e) && r < worst) worst = r;
                *exponents++ = (uint8_t)e;
                for (int half = 0; half < 2; half++) {
                    words = in_words(columns[half]);
                    memcpy(codes + 128 * half + 4 * (r % KT_HALF_ROWS), &words, 4);
                    words >>= 32;
                    memcpy(codes + 128 * half + 64 + 4 * (r % KT_HALF_ROWS), &words, 4);
                }
                if (r % KT_HALF_ROWS == KT_HALF_ROWS - 1) codes += KT_MXFP4_HALF_BYTES;
            }
    *bad_row = worst < n ? worst : -1;
    return 1;
}
