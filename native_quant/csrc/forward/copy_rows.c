/* Panels back to rows (bytes.md, Panels), rectangles of them, by the threads of a pool. */
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "convert/panels.h"
#include "kernels.h"
#include "system/pool.h"

/* The codes of a row's 8 columns: from a word of the even columns and one of the odd ones to the order of the columns.
 */
static uint32_t order_codes(uint32_t words) {
    words = (words & 0xff0000ff) | (words & 0x00ff0000) >> 8 | (words & 0x0000ff00) << 8;
    return (words & 0xf00ff00f) | (words & 0x0f000f00) >> 4 | (words & 0x00f000f0) << 4;
}

void kt_unpack_nibbles(const uint8_t *panel, int64_t blocks, uint32_t flip, uint8_t *rows, int64_t row_stride) {
    for (int64_t b = 0; b < blocks; b++)
        for (int r = 0; r < KT_PANEL_ROWS; r++, panel += r % KT_HALF_ROWS ? 0 : KT_MXFP4_HALF_BYTES)
            for (int v = 0; v < KT_GROUP_COLUMNS / 8; v++) {
                uint32_t words;
                memcpy(&words, panel + v * 64 + r % KT_HALF_ROWS * 4, sizeof words);
                words = order_codes(words) ^ flip;
                memcpy(rows + r * row_stride + (b * KT_GROUP_COLUMNS / 2 + v * 4), &words, sizeof words);
            }
}

/* --- what a panel becomes: 32 rows of x->columns items ------------------------------------------------------------ */

typedef void panel_fn(const kt_kernels *kernels, const ktq_rectangle *x, const uint8_t *panel, uint8_t *rows);

static void numbers(const kt_kernels *kernels, const ktq_rectangle *x, const uint8_t *panel, uint8_t *rows,
                    int item_bytes) {
    int64_t pairs = KT_HALF_ROWS * 2 * item_bytes; /* a pair of columns of 16 rows */
    for (int64_t c = 0; c < x->columns; c += 2 * KT_BLOCK_PAIRS)
        for (int half = 0; half < 2; half++, panel += KT_BLOCK_PAIRS * pairs)
            kernels->transpose(2 * item_bytes, panel, pairs, KT_HALF_ROWS, KT_BLOCK_PAIRS,
                               rows + half * KT_HALF_ROWS * x->row_stride + c * item_bytes, x->row_stride);
}

static void bytes(const kt_kernels *kernels, const ktq_rectangle *x, const uint8_t *panel, uint8_t *rows) {
    numbers(kernels, x, panel, rows, 1);
}

static void halves(const kt_kernels *kernels, const ktq_rectangle *x, const uint8_t *panel, uint8_t *rows) {
    numbers(kernels, x, panel, rows, 2);
}

static void nibbles(const kt_kernels *kernels, const ktq_rectangle *x, const uint8_t *panel, uint8_t *rows) {
    (void)kernels;
    kt_unpack_nibbles(panel, x->columns * 2 / KT_GROUP_COLUMNS, 0, rows, x->row_stride);
}

static void offset_nibbles(const kt_kernels *kernels, const ktq_rectangle *x, const uint8_t *panel, uint8_t *rows) {
    (void)kernels;
    kt_unpack_nibbles(panel, x->columns * 2 / KT_GROUP_COLUMNS, 0x88888888, rows, x->row_stride);
}

static void group_scales(const kt_kernels *kernels, const ktq_rectangle *x, const uint8_t *panel, uint8_t *rows) {
    (void)kernels;
    for (int64_t g = 0; g < x->columns; g++)
        for (int r = 0; r < KT_PANEL_ROWS; r++, panel += 2) memcpy(rows + r * x->row_stride + 2 * g, panel, 2);
}

static void scale_bytes(const kt_kernels *kernels, const ktq_rectangle *x, const uint8_t *panel, uint8_t *rows) {
    (void)kernels;
    for (int64_t g = 0; g < x->columns; g++)
        for (int r = 0; r < KT_PANEL_ROWS; r++) rows[r * x->row_stride + g] = *panel++;
}

static void exponents(const kt_kernels *kernels, const ktq_rectangle *x, const uint8_t *panel, uint8_t *rows) {
    (void)kernels;
    for (int64_t g = 0; g < x->columns; g++)
        for (int r = 0; r < KT_PANEL_ROWS; r++) {
            uint16_t scale = (uint16_t)(*panel++ << 7);
            memcpy(rows + r * x->row_stride + 2 * g, &scale, sizeof scale);
        }
}

/* panel: by ktq_in_rows; columns is a multiple of `multiple`. NULL: rows lie as they are to lie, x->columns bytes. */
static const struct {
    panel_fn *panel;
    int multiple;
} ORDERS[] = {
    [KTQ_PANEL_BYTES] = {bytes, KT_BLOCK_PAIRS * 2},
    [KTQ_PANEL_HALVES] = {halves, KT_BLOCK_PAIRS * 2},
    [KTQ_PANEL_NIBBLES] = {nibbles, KT_GROUP_COLUMNS / 2},
    [KTQ_PANEL_OFFSET_NIBBLES] = {offset_nibbles, KT_GROUP_COLUMNS / 2},
    [KTQ_PANEL_SCALES] = {group_scales, 1},
    [KTQ_PANEL_SCALE_BYTES] = {scale_bytes, 1},
    [KTQ_PANEL_EXPONENTS] = {exponents, 1},
    [KTQ_IN_ROWS] = {NULL, 1},
};

/* --- by the threads of a pool ------------------------------------------------------------------------------------- */

typedef struct {
    const ktq_rectangle *rectangle;
    int64_t count;
    const kt_kernels *kernels;
    _Atomic int64_t next; /* panel, counted through all rectangles */
} copying;

static int64_t tasks(const ktq_rectangle *x) {
    return ORDERS[x->order].panel ? x->rows / KT_PANEL_ROWS : 1;
}

static void copy(const kt_kernels *kernels, const ktq_rectangle *x, int64_t task) {
    const uint8_t *from = x->from;
    uint8_t *to = x->to;
    if (ORDERS[x->order].panel)
        ORDERS[x->order].panel(kernels, x, from + task * x->from_stride, to + task * KT_PANEL_ROWS * x->row_stride);
    else
        for (int64_t r = 0; r < x->rows; r++)
            memcpy(to + r * x->row_stride, from + r * x->from_stride, (size_t)x->columns);
}

static void work(void *job, int group, int worker) {
    (void)group, (void)worker;
    copying *state = job;
    int64_t at = 0, task = atomic_fetch_add(&state->next, 1);
    for (int64_t i = 0; i < state->count; at += tasks(&state->rectangle[i++]))
        for (; task < at + tasks(&state->rectangle[i]); task = atomic_fetch_add(&state->next, 1))
            copy(state->kernels, &state->rectangle[i], task - at);
}

int ktq_copy_rows(ktq_pool *pool, int64_t count, const ktq_rectangle *rectangle) {
    if (!pool || count < 0 || (count && !rectangle)) return KTQ_EINVAL;
    for (int64_t i = 0; i < count; i++) {
        const ktq_rectangle *x = &rectangle[i];
        if (x->order < 0 || x->order > KTQ_IN_ROWS || !x->from || !x->to) return KTQ_EINVAL;
        if (x->rows < 1 || x->columns < 1 || x->columns % ORDERS[x->order].multiple) return KTQ_ESHAPE;
        if (ORDERS[x->order].panel && x->rows % KT_PANEL_ROWS) return KTQ_ESHAPE;
    }
    int error = kt_pool_enter(pool);
    if (error) return error;
    copying job = {.rectangle = rectangle, .count = count, .kernels = kt_current()};
    kt_pool_run(pool, work, &job);
    kt_pool_leave(pool);
    return KTQ_OK;
}
