/* The kernels: their types, a declaration for each row of kernels.def, and the table of the kernels in use. */
#ifndef KT_KERNELS_H
#define KT_KERNELS_H

#include <stdint.h>

#include "cpu.h"
#include "geometry.h"
#include "isa.h"
#include "ktq.h"
#include "scale_search.h"

#define KT_ISA_NUMBER(name, contains) KT_ISA_##name,
enum { KT_ISAS(KT_ISA_NUMBER) KT_ISA_COUNT };
#undef KT_ISA_NUMBER

/* arch/: one bit (1 << KT_ISA_scalar ...) for each instruction set that the CPU and the operating system support. Call
   it once: it may ask the operating system for permission. */
unsigned kt_cpu_isas(void);
/* arch/: those that are slower here than the instruction sets that they contain, so that they are no default. */
unsigned kt_cpu_slow_isas(void);

enum { KT_GROUP_COLUMNS = 32 }; /* groups of columns are multiples of it */

/* Returns the largest |x| of k BF16 values, as the bits of a BF16; >= 0x7f80 if a value is not finite. row: any
   alignment; k: a multiple of 64. */
typedef uint16_t kt_amax_fn(const uint8_t *row, int64_t k);

/* Columns and bytes of a block of a ggml type; 0 columns if the encoding has no blocks. */
typedef struct {
    int64_t columns, bytes;
} kt_block;

enum { KT_BLOCK_COLUMNS = 256 }; /* columns of the largest block */

static inline kt_block kt_get_block(int kind) {
    switch (kind) {
    case KTQ_Q4_0: return (kt_block){32, 18};
    case KTQ_Q8_0: return (kt_block){32, 34};
    case KTQ_GGML_MXFP4: return (kt_block){32, 17};
    case KTQ_Q4_K: return (kt_block){KT_BLOCK_COLUMNS, 144};
    case KTQ_Q5_K: return (kt_block){KT_BLOCK_COLUMNS, 176};
    case KTQ_Q6_K: return (kt_block){KT_BLOCK_COLUMNS, 210};
    }
    return (kt_block){0, 0};
}

/* The rows that are read next, which kernels prefetch. column_bits: bits of each column; 0: do not prefetch. */
typedef struct {
    const uint8_t *first;
    int64_t row_stride, column_bits;
} kt_prefetch;

/* Quantizes 16 rows of `columns` BF16 values and writes their half of each tile: tile t at tiles + t * KT_TILE_BYTES.
   rows, row_stride (bytes): any alignment. columns: whole tiles, at most KT_K_BLOCK. reciprocal: 1/scale, or 0, of each
   row. Vector kernels do not treat subnormal x as 0; quantize.c uses the scalar kernel for rows where that matters. */
typedef void kt_pack_fn(const uint8_t *rows, int64_t row_stride, int64_t columns, const float *reciprocal,
                        uint8_t *tiles, const kt_prefetch *prefetch);

/* Writes the half tiles of 16 rows of `columns` codes, as kt_pack_fn does. rows, row_stride (bytes): any alignment.
   Returns 1, or 0 if a code is out of range; the tiles are then undefined. */
typedef int kt_pack_codes_fn(int bits, const int8_t *rows, int64_t row_stride, int64_t columns, uint8_t *tiles,
                             const kt_prefetch *prefetch);

/* One row of k finite BF16 values as MOE_INT8 or MOE_INT4 (numerics.md, section 2c) in their plain order (bytes.md):
   codes of x / step, KT_PLAIN_BYTES of each KT_PLAIN_ROWS * KT_PLAIN_BYTES. step: not 0, or 0 for a row of codes 0.
   row: any alignment; k: a multiple of 64. */
typedef void kt_plain_row_fn(int bits, const uint8_t *row, int64_t k, float step, uint8_t *codes);
enum { KT_PLAIN_ROWS = 8, KT_PLAIN_BYTES = 32 };

/* One row of k BF16 values in groups (numerics.md, section 6): k * bits / 8 bytes of codes and k / group scales. row:
   any alignment; group: a multiple of KT_GROUP_COLUMNS that divides k. Returns 1, or 0 if a value is not finite; the
   outputs are then partly written. */
typedef int kt_groups_fn(int bits, int64_t group, int rounding, const uint8_t *row, int64_t k, uint8_t *packed,
                         uint16_t *scale);

/* Half a block in panels (bytes.md): 16 rows of KT_GROUP_COLUMNS BF16 values as MXFP4 (numerics.md, section 9): 256
   bytes of codes, and an exponent of each row. rows, row_stride (bytes): any alignment. Returns 1, or 0 if a value is
   not finite; the outputs are then partly written. */
typedef int kt_pack_mxfp4_fn(const uint8_t *rows, int64_t row_stride, uint8_t *codes, uint8_t *exponents,
                             const kt_prefetch *prefetch);
enum { KT_MXFP4_HALF_BYTES = KT_HALF_ROWS * KT_GROUP_COLUMNS / 2 };

/* Writes the same half of each of `blocks` blocks, from stored E2M1 codes: KTQ_FP4_E2M1 that begin with a whole byte,
   or KTQ_GGML_MXFP4. The halves are two halves apart in `codes`. rows, row_stride (bytes): any alignment. */
typedef void kt_reorder_mxfp4_fn(int kind, const uint8_t *rows, int64_t row_stride, int64_t blocks, uint8_t *codes);

/* BF16 values, all finite, divided by the scale, as E4M3 (numerics.md, section 9). values: any alignment; count: a
   multiple of 32. */
typedef void kt_e4m3_fn(const uint8_t *values, int64_t count, float scale, uint8_t *codes);

/* A block of columns of GPTQ for 32 rows (numerics.md, section 7). rounded: whether dequantized codes are rounded to
   BF16. inverse[width][width]: only its upper triangle is read. weight, scale and error are tiles
   [width][KT_PANEL_ROWS] on a boundary of 64 bytes: weight is overwritten with the corrected weights, scale with the
   dequantized codes; error is written. */
typedef struct {
    kt_code_range codes;
    int rounded;
    int64_t width;
    const float *inverse;
    float *weight, *scale, *error;
} kt_gptq;
typedef void kt_gptq_fn(const kt_gptq *job);

/* to[c][r] -= from[i][r] * slice[i][c], each rounded once, i = 0 .. count-1 in that order: c of KTQ_SLICE_COLUMNS, r of
   KT_PANEL_ROWS. from and to: on a boundary of 64 bytes; `to` may hold `from`, for columns whose factor is 0. */
typedef void kt_slice_products_fn(int64_t count, const float *slice, const float *from, float *to);

/* to[i] += factor * from[i], rounded twice. Any alignment. */
typedef void kt_add_scaled_fn(int64_t count, float factor, const float *from, float *to);

/* rows x columns values of `kind` to BF16; FP8 is multiplied by scale. Row r begins at in + r * in_stride (bytes, any
   alignment) and goes to out + r * out_pitch (values). */
typedef void kt_decode_fn(int kind, const uint8_t *in, int64_t in_stride, int64_t rows, int64_t columns, float scale,
                          uint16_t *out, int64_t out_pitch);

/* Columns of one row of packed integers (ktq_source): column c is code number skip + c of `codes`, of 8 bits after its
   bits in `flip` are flipped; (code - zeros[g]) * scales[g] is its value. g = column_groups[c], or (first + c) / group
   if column_groups is NULL. zeros: NULL if all are 2^(bits-1). 0 <= first, skip. */
typedef struct {
    int bits;
    uint8_t flip;
    const uint8_t *codes;
    int64_t skip, columns;
    const float *scales, *zeros;
    int64_t first, group;
    const int32_t *column_groups;
} kt_codes;
typedef void kt_decode_codes_fn(const kt_codes *row, uint16_t *out);

/* The zero point of the row's group number `group`. */
static inline float kt_zero_point(const kt_codes *row, int64_t group) {
    return row->zeros ? row->zeros[group] : (float)(1 << (row->bits - 1));
}

/* The end of the columns of the row's group number `group`. */
static inline int64_t kt_group_end(const kt_codes *row, int64_t group) {
    int64_t end = (group + 1) * row->group - row->first;
    return end < row->columns ? end : row->columns;
}

/* Returns the row with only its columns start .. stop-1. */
static inline kt_codes kt_select_codes(const kt_codes *row, int64_t start, int64_t stop) {
    int64_t at = row->skip + start;
    kt_codes part = *row;
    part.codes += at * row->bits / 8;
    part.skip = row->bits == 4 ? at % 2 : 0;
    part.columns = stop - start;
    part.first += start;
    if (part.column_groups) part.column_groups += start;
    return part;
}

/* Columns of one row of FP8 or FP4 (ktq_source): column c is code number skip + c of `codes`, times
   scales[(first + c) / group]. 0 <= first, skip. */
typedef struct {
    int kind;
    const uint8_t *codes;
    int64_t skip, columns;
    const float *scales;
    int64_t first, group;
} kt_floats;
typedef void kt_decode_floats_fn(const kt_floats *row, uint16_t *out);

/* Returns the row's columns from `start` on, which share this scale. */
static inline kt_floats kt_group_floats(const kt_floats *row, const float *scale, int64_t start, int64_t columns) {
    return (kt_floats){row->kind, row->codes, row->skip + start, columns, scale, 0, columns};
}

/* Blocks of a type of ggml, one after the other: kt_get_block(kind) values each. */
typedef void kt_decode_blocks_fn(int kind, const uint8_t *blocks, int64_t count, uint16_t *out);

/* out[r][c] = in[c][r] for at most 32 rows: items of item_bytes (1, 2 or 4); column c begins at in + c * column_stride,
   row r at out + r * row_pitch (bytes). */
typedef void kt_transpose_fn(int item_bytes, const uint8_t *in, int64_t column_stride, int64_t rows, int64_t columns,
                             uint8_t *out, int64_t row_pitch);

/* int8 activations are stored in tiles of `rows` tokens, at most KT_MAX_TILE_ROWS: 64 columns of each token, one
   token after the other, then the next 64 columns. In tiles of one row, a token's columns are contiguous. */
typedef struct {
    int64_t rows;
    int64_t tokens; /* most tokens for a call of the kernel: KT_MIN_TOKENS to KT_MAX_TOKENS */
} kt_tiling;
enum { KT_MAX_TILE_ROWS = 16, KT_MIN_TOKENS = 144, KT_MAX_TOKENS = 512 };

/* The tiling that an instruction set needs for the activations of m tokens that share weights. */
typedef kt_tiling kt_tiling_fn(int bits, int64_t m);

/* Offset of the columns of token t in tiles of `rows` tokens. Each 64 columns of a token are rows * 64 bytes apart. */
static inline int64_t kt_tile_offset(int64_t rows, int64_t k, int64_t t) {
    return t / rows * rows * k + t % rows * 64;
}

/* Integer dot products of the activations of m tokens with the 32 rows of each panel, over all k columns, exact: unit *
   c[s * c_pitch + t * 32 + r] = weight_unit * the sum over j of a[t][j] * code[panel s][r][j]. The kernel returns unit;
   weight_unit is the unit in the weight's kt_geometry. a: -127..127, in tiles of tile_rows tokens. The last tile is
   read whole; c has rows for whole tiles. sums[t * sums_pitch + b]: the sum of token t's activations in column block b,
   for kernels that multiply unsigned codes. c: on a boundary of 64 bytes. scratch: KT_GEMM_SCRATCH bytes on a boundary
   of 64. next: address of the first panel that this thread will probably multiply next, or NULL. Its first column block
   has next_bytes bytes. Kernels may prefetch it, but do not read it. */
typedef struct {
    int64_t m, k;
    const int8_t *a;
    int64_t tile_rows;
    const int32_t *sums;
    int64_t sums_pitch;
    int64_t panels;
    const kt_panel *panel;
    int32_t *c;
    int64_t c_pitch;
    const uint8_t *next;
    int64_t next_bytes;
    uint8_t *scratch;
} kt_gemm;
enum { KT_GEMM_SCRATCH = KT_PANEL_ROWS * KT_K_BLOCK };
typedef int kt_gemm_fn(const kt_gemm *job);

/* A token's codes in a tile: each 64 columns are `pitch` bytes apart. */
typedef struct {
    int8_t *q;
    int64_t pitch;
} kt_code_row;

/* One row of activations as int8 (numerics.md, section 5). x: k values, BF16 if is_bf16, else float32; k: a multiple
   of 64. Writes the codes to each of `copies` places, their sum in each column block to `sums`, and the sum of their
   squares to *energy. Returns the scale; NaN, with codes 0, if a value is not finite. */
typedef float kt_quantize_row_fn(int is_bf16, const void *x, int64_t k, int64_t copies, const kt_code_row *place,
                                 int32_t *sums, int64_t *energy);

/* Quantizes the remainder x - q * scale of a float32 row in steps of KT_REMAINDER_UNIT * scale (`step`, a normal
   number): codes q2, in the same kind of tile as q, and their sums. */
#define KT_REMAINDER_UNIT (1.0f / 254.0f)
typedef void kt_remainder_fn(const float *x, int64_t k, float scale, float step, kt_code_row q, int8_t *q2,
                             int32_t *sums);

/* Outputs of 32 columns of m tokens from dot products: y = token_scale[t] * (row_scale[r] * (unit * acc)). unit: the
   result of kt_gemm_fn. exact: round to BF16 where kt-kernel does. out[t * out_pitch + r]: float32; with out_pitch 32
   it may be the memory of acc. */
typedef struct {
    int exact;
    int64_t m;
    float unit;
    const float *token_scale;
    const int32_t *acc;
    const float *row_scale;
    float *out;
    int64_t out_pitch;
    const int32_t *remainder_row; /* row of each token's remainder in acc and token_scale; 0: none. NULL: none at all */
} kt_outputs;
/* out = y, plus y of its remainder. */
typedef void kt_scale_rows_fn(const kt_outputs *job);

/* The activation of m rows of 32 elements, gate and up [m][32]: out[t * out_pitch + r], which may be gate; or partial
   derivatives, [m][32] each. up NULL: ones, and by_up is not written. by_gate NULL: compute the value. */
typedef struct {
    const ktq_function *function;
    int64_t m;
    const float *gate, *up;
    float *out;
    int64_t out_pitch;
    float *by_gate, *by_up;
} kt_activation;
typedef void kt_activation_fn(const kt_activation *job);

/* out[c] = the sum over i, in that order, of fma(rows[i][c], weights[i], ...), from 0. columns: a multiple of 32. */
typedef void kt_combine_fn(int64_t terms, const float *const *rows, const float *weights, int64_t columns, float *out);
/* out[c] = rows[0][c] + rows[1][c] + ... as BF16. columns: a multiple of 32. */
typedef void kt_merge_fn(int64_t terms, const float *const *rows, int64_t columns, uint16_t *out);

/* --- BF16 arithmetic (numerics.md, section 5b) -------------------------------------------------------------------- */

typedef struct kt_bf16_panel kt_bf16_panel;

enum {
    KT_SUM_COLUMNS = 32,    /* columns whose products are added up before they are scaled */
    KT_CHUNK_COLUMNS = 256, /* most columns of a chunk */
    /* While codes become a chunk, half as many bytes are prefetched, from this distance after the first code on. */
    KT_CHUNK_AHEAD = 4096,
};

typedef struct kt_kernels kt_kernels;

/* A chunk is 32 rows x `columns` columns (a multiple of KT_SUM_COLUMNS) of BF16 in the order of BF16 experts
   (bytes.md), or of int16 in the same order. chunk: columns of a panel from `first` on, unscaled, on a boundary of 64
   bytes. Weights with several terms have several contiguous chunks. */
typedef void kt_chunk_fn(const kt_kernels *kernels, const kt_bf16_panel *panel, int64_t first, int64_t columns,
                         uint16_t *chunk);

/* Writes a number for each row and KT_SUM_COLUMNS columns of a chunk: out [columns / KT_SUM_COLUMNS][32 rows]. */
typedef void kt_scales_fn(const kt_kernels *kernels, const kt_bf16_panel *panel, int64_t first, int64_t columns,
                          float *out);

/* Codings that kernels can decode in registers, if an expert has few tokens. */
enum {
    KT_OTHER_CODES, /* only `chunk` decodes them */
    KT_BF16_CODES,  /* BF16 numbers */
    KT_E4M3,        /* FP8 E4M3 */
    KT_CODINGS,
};

/* Whether codes of these columns must be decoded by `chunk`, whatever their coding is. */
typedef int kt_is_special_fn(const kt_bf16_panel *panel, int64_t first, int64_t columns);

/* Codes that are integers, of 4, 5, 6 or 8 bits.
     chunk        converts codes to chunks of int16, -4096 to 4096
     offset       what makes them unsigned, if it is added; 0: they are unsigned, or have 8 bits
     has_factors  1: signed bytes for each 16 columns multiply the codes (Q6_K, ktq.h)
     values       the integer of each code of 4 bits, plus offset, at most 31; NULL: codes are the integers */
typedef struct {
    kt_chunk_fn *chunk;
    int offset, has_factors;
    const uint8_t *values;
} kt_integers;

/* 32 rows of a weight: their codes and scales (formats.h).
     bits         bits of a code
     scale_bytes  bytes of the scales of KT_SUM_COLUMNS columns, if the codes are integers
     sum_columns  aligned columns of a row that share a scale
     terms        number of chunks whose sum is the weights
     coding       KT_OTHER_CODES .. KT_E4M3
     values       codes of 4 bits: BF16 value of each code; values[0] is 0
     is_special   NULL: no columns are special
     chunk        converts codes to chunks; NULL: codes are stored as chunks
     integers     how codes are integers, for gemm_int16; or NULL
     scale        reads the scales, normal numbers that multiply the sums of products; NULL: no scales
     least        reads the least values: a weight is code * scale - least; NULL: least is 0 */
struct kt_bf16_panel {
    const uint8_t *codes, *scales;
    int bits, terms;
    int64_t scale_bytes, sum_columns;
    int coding;
    const uint16_t *values;
    kt_is_special_fn *is_special;
    kt_chunk_fn *chunk;
    const kt_integers *integers;
    kt_scales_fn *scale, *least;
};

/* Codes of 4 bits in the order of MXFP4 (bytes.md) to a chunk of BF16 or int16: values[code]. values[0] is 0. */
typedef void kt_chunk_nibbles_fn(const uint16_t *values, const uint8_t *codes, int64_t columns, uint16_t *chunk);

/* Scales to float32: BF16, E8M0 (of which 0 becomes 0), or half of E8M0. count: a multiple of 32. */
enum { KT_BF16_SCALES, KT_E8M0_SCALES, KT_HALF_E8M0_SCALES };
typedef void kt_widen_scales_fn(int kind, const uint8_t *scales, int64_t count, float *out);

/* Codes of FP8 E4M3 (bytes.md) to a chunk. */
typedef void kt_chunk_fp8_fn(const uint8_t *codes, int64_t columns, uint16_t *chunk);

/* Codes of 5 bits (0..31), 6 (-32..31) or 8 (-128..127) to a chunk (ktq.h). scales: with 6 bits, integers in BF16 for
   groups of 16 columns, [columns / 16][32 rows]; the products are rounded to BF16. Else NULL. */
typedef void kt_chunk_integers_fn(int bits, const uint8_t *codes, const uint16_t *scales, int64_t columns,
                                  uint16_t *chunk);

/* Codes of 4 (in the order of MXFP4), 5, 6 or 8 bits to a chunk of int16. has_sign: codes of 4 bits are -8..7, else
   0..15. scales: with 6 bits, signed bytes that multiply the codes, [columns / 16][32 rows]. */
typedef void kt_chunk_int16_fn(int bits, int has_sign, const uint8_t *codes, const uint8_t *scales, int64_t columns,
                               int16_t *chunk);

/* FP16 in the order of BF16 to two chunks, whose sum it is: the upper 8 bits of each number, and the other bits. */
typedef void kt_chunk_halves_fn(const uint8_t *codes, int64_t columns, uint16_t *chunk);

/* Scales in FP16 to float32: out[groups][32 rows] = halves[groups][32], or halves[32] * factors[groups][32]. */
typedef void kt_half_scales_fn(const uint8_t *halves, const uint8_t *factors, int64_t groups, float *out);

/* Multiplies a chunk with scales in BF16, [columns / 16][32 rows]. The products must be exact in BF16. */
typedef void kt_scale_chunk_fn(const uint16_t *scales, int64_t columns, uint16_t *chunk);

/* c[t][32 rows] -= least[group][32] * sums[t * sums_pitch + group], in the order of the groups. c: on a boundary of 64
   bytes. */
typedef void kt_subtract_least_fn(int64_t m, int64_t groups, const float *least, const float *sums,
                                  int64_t sums_pitch, float *c);

/* Rounds BF16 activations to what products of integers multiply: the nearest multiples of the unit of their
   KT_SUM_COLUMNS columns (gemm_int16.h), which BF16 holds. columns: a multiple of KT_SUM_COLUMNS. */
typedef void kt_round_units_fn(int64_t columns, uint16_t *a);

/* The sums of KT_SUM_COLUMNS BF16 activations each, after they are rounded to 8 bits. Rounded activations and their
   sums go with each other: a weight that is stored as a code above a least value is then multiplied with one number,
   and the error of rounding is not multiplied with the code. columns: a multiple of KT_SUM_COLUMNS. */
typedef void kt_sum_units_fn(int64_t columns, const uint16_t *a, float *sums);

/* Sums of products of m rows of BF16 activations with the 32 rows of each panel, over all k columns:
   c[s * c_pitch + t * 32 + r]. The order of additions does not depend on m, `panels` or their order.
   sums[t * k / KT_SUM_COLUMNS + g]: sum of row t's activations in group g, for panels with least values; else NULL.
   With int8 as kt_sum_units_fn adds them up.
   c: on a boundary of 64 bytes. scratch: KT_GEMM_SCRATCH bytes on a boundary of 64.
   int8: 1: products of integers below 8 bits round activations to 8 bits.
   is_rounded: 1: the activations are what kt_round_units_fn makes of them. */
typedef struct {
    int int8, is_rounded;
    int64_t m, k;
    const uint16_t *a;
    int64_t a_pitch;
    int64_t panels;
    const kt_bf16_panel *panel;
    const float *sums;
    const kt_kernels *kernels;
    float *c;
    int64_t c_pitch;
    uint8_t *scratch;
} kt_bf16_gemm;
typedef void kt_bf16_gemm_fn(const kt_bf16_gemm *job);

/* out[t * out_pitch + r] = x[m][32] as BF16. errors: the rounding error, as BF16, in the same layout, or NULL. */
typedef void kt_split_bf16_fn(int64_t m, const float *x, uint16_t *out, uint16_t *errors, int64_t out_pitch);

/* Sums of products of rows of BF16 weights, [rows][k], with m tokens (1 to KTQ_ROW_TOKENS), x [m][k]: out [rows][m].
   k is a multiple of KTQ_ROW_MULTIPLE. Equations: numerics.md, section 5e. */
typedef struct {
    int64_t rows, k, m;
    const uint8_t *weight;
    const uint16_t *x;
    float *out;
} kt_row_products;
typedef void kt_row_products_fn(const kt_row_products *job);

/* The same for int8 weights with BF16 scales [rows][k / KTQ_ROW_MULTIPLE], and x in 16 bits. */
typedef struct {
    int64_t rows, k, m;
    const int8_t *codes;
    const uint8_t *scales;
    const int16_t *x;
    float *out;
} kt_int8_row_products;
typedef void kt_int8_row_products_fn(const kt_int8_row_products *job);

/* Attention of queries that share keys to a span of keys (numerics.md, section 5f). Of each query: out, the sum of the
   values weighted by exp(product - greatest), [value_size]; the greatest product; the sum of the weights. The results
   of the next query are `pitch` further. */
enum { KT_SPAN = 256, KT_SPAN_QUERIES = 16 };
typedef struct {
    int64_t queries, keys, size, value_size; /* at most KT_SPAN_QUERIES and KT_SPAN; sizes as in ktq_attention */
    float scale;
    const uint16_t *q;
    const uint8_t *k, *v;
    int64_t pitch;
    float *out, *greatest, *sum;
} kt_span;
typedef void kt_attend_span_fn(const kt_span *span);

/* --- training (numerics.md, section 5c) --------------------------------------------------------------------------- */

/* Address of a pair of columns in a panel of BF16, for the first 16 rows; the other 16 rows are KT_HALF_BYTES
 * further. */
static inline uint16_t *kt_panel_line(uint16_t *panel, int64_t pair) {
    return panel + pair / 16 * (KT_TILE_BYTES / 2) + pair % 16 * 32;
}

/* Writes pairs of rows of 32 numbers as pairs of columns of a panel of BF16, from pair `at` on. The numbers are BF16
   (item_bytes 2; scale: one for each row, or NULL) or int8 (item_bytes 1, with scales). Products with scales are
   rounded, and must not be NaN. rows, row_stride (bytes): any alignment. */
typedef void kt_interleave_fn(int item_bytes, const uint8_t *rows, int64_t row_stride, int64_t pairs,
                              const float *scale, int64_t at, uint16_t *panel);

/* Transposes a tile of 32 x 32 BF16 numbers. Any alignment. */
typedef void kt_transpose_tile_fn(const uint8_t *tile, uint8_t *out);

#define FAMILY(family, type) type kt_##family##_scalar;
#include "kernels.def"
#define KERNEL(family, isa) __typeof__(kt_##family##_scalar) kt_##family##_##isa;
#include "kernels.def"

/* A kernel of each family. */
struct kt_kernels {
#define FAMILY(family, type) type *family;
#include "kernels.def"
};

/* The kernels in use (dispatch.c). */
const kt_kernels *kt_current(void);
/* activations.c: the kernel of KTQ_SILU etc.; NULL for any other number. */
kt_activation_fn *kt_activation_of(const kt_kernels *kernels, int activation);

/* encodings.c: checks a source of n rows and k columns; returns KTQ_OK or an error code. */
int kt_check_source(const ktq_source *source, int64_t n, int64_t k);
/* encodings.c: bits of a value, rounded down; 0 for an unknown encoding. */
int kt_column_bits(int kind);
/* encodings.c: whether the encoding is packed integers. */
int kt_is_integer(int kind);
/* encodings.c: whether the values of a row are contiguous. */
int kt_is_row_contiguous(const ktq_source *source);
/* integers.c: decodes rows first .. first+rows-1 (at most 32) of packed integers: out[rows][k]. */
void kt_decode_integers(const kt_kernels *kernels, const ktq_source *source, int64_t first, int64_t rows, int64_t k,
                        uint16_t *out);
/* source.c: returns row r as k BF16 values, in place or decoded into scratch (32*k uint16). Call it with r = 0, 1, 2
   ...; the rows of a half tile stay valid together. */
const uint8_t *kt_bf16_row(const kt_kernels *kernels, const ktq_source *source, int64_t r, int64_t k,
                           uint16_t *scratch);
/* source.c: returns the address of rows first .. first+rows-1 (at most 32) as BF16, and their distance in bytes. Rows
   that must be decoded are in scratch (32*k uint16). */
const uint8_t *kt_bf16_rows(const kt_kernels *kernels, const ktq_source *source, int64_t first, int64_t rows, int64_t k,
                            uint16_t *scratch, int64_t *row_stride);

#endif
