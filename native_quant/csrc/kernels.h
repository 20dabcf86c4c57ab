/* The kernels: one function type per family, one declaration per row of kernels.def, and the table of those in use. */
#ifndef KT_KERNELS_H
#define KT_KERNELS_H

#include <stdint.h>

#include "isa.h"
#include "ktq.h"

enum {
    KT_STRIP_ROWS = 32, /* rows of a tile: what is transposed at a time */
    KT_HALF_ROWS = 16,  /* rows of a half tile: what is quantized and packed at a time */
    KT_HALF_BYTES = 1024,
    KT_TILE_BYTES = 2048,
    KT_K_BLOCK = 3584, /* columns of a column block */
};

/* The largest |x| of k BF16 values as BF16 bits without the sign; >= 0x7f80 if one of them is not finite. row: any
   alignment; k: a multiple of 64. */
typedef uint16_t kt_amax_fn(const uint8_t *row, int64_t k);

/* Rows that will be read next and may be brought nearer meanwhile: item_bytes for each column; 0: none. */
typedef struct {
    const uint8_t *first;
    int64_t row_stride, item_bytes;
} kt_ahead;

/* Quantizes 16 rows of `columns` BF16 values and writes their half of each tile: tile t at tiles + t * KT_TILE_BYTES.
   rows, row_stride (bytes): any alignment. columns: whole tiles, at most KT_K_BLOCK. reciprocal: 1/scale, or 0, of each row.
   Vector kernels multiply subnormal x as they are: quantize.c gives rows for which that matters to the scalar kernel. */
typedef void kt_pack_fn(const uint8_t *rows, int64_t row_stride, int64_t columns, const float *reciprocal, uint8_t *tiles,
                        const kt_ahead *ahead);
typedef kt_pack_fn kt_pack_int8_fn, kt_pack_int4_fn;

/* rows x columns values of `kind` to BF16; FP8 is multiplied by scale. Row r begins at in + r * in_stride (bytes, any alignment)
   and goes to out + r * out_pitch (values). */
typedef void kt_decode_fn(int kind, const uint8_t *in, int64_t in_stride, int64_t rows, int64_t columns, float scale,
                          uint16_t *out, int64_t out_pitch);

/* out[r][c] = in[c][r] for at most 32 rows: items of item_bytes (1, 2 or 4); column c begins at in + c * column_stride,
   row r at out + r * row_pitch (bytes). */
typedef void kt_transpose_fn(int item_bytes, const uint8_t *in, int64_t column_stride, int64_t rows, int64_t columns,
                             uint8_t *out, int64_t row_pitch);

#define KERNEL(family, isa) kt_##family##_fn kt_##family##_##isa;
#include "kernels.def"
#undef KERNEL

typedef struct {
    kt_amax_fn *amax;
    kt_pack_fn *pack_int8, *pack_int4;
    kt_decode_fn *decode;
    kt_transpose_fn *transpose;
} kt_kernels;

/* The kernels in use (dispatch.c). */
const kt_kernels *kt_current(void);

/* source.c: KTQ_OK, or what is wrong with a source of n rows and k columns. */
int kt_check_source(const ktq_source *source, int64_t n, int64_t k);
/* source.c: bytes of one value. */
int kt_item_bytes(int kind);
/* source.c: the values of a row lie one after the other. */
int kt_is_row_contiguous(const ktq_source *source);
/* source.c: row r as k BF16 values: where they lie, or decoded into scratch (32*k uint16). To be called with r = 0, 1, 2 ...;
   the rows of a half tile stay valid together. */
const uint8_t *kt_bf16_row(const kt_kernels *kernels, const ktq_source *source, int64_t r, int64_t k, uint16_t *scratch);
/* quantize.c: columns of a tile for this number of bits; n and k must be multiples (KTQ_OK, KTQ_EINVAL, KTQ_ESHAPE). */
int kt_check_shape(int bits, int64_t n, int64_t k);

/* The floating-point state in which the numerics are defined: round to nearest, subnormals kept. Some libraries switch
   FTZ/DAZ on for the whole process when they are loaded; kt_enter returns what was set, kt_leave puts it back. */
static inline unsigned kt_enter(void) {
    unsigned before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(0x1f80);
    return before;
}
static inline void kt_leave(unsigned before) {
    __builtin_ia32_ldmxcsr(before);
}

#endif
