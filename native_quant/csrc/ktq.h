/* ktq converts linears in any encoding to packed experts (AMXINT4, AMXINT8, MXFP4, FP8, BF16), computes the codes and
 * scales of other quantizers, and runs the forward of routed experts in these formats.
 *
 * Conversions take buffers and fill buffers: they do not allocate, print or keep anything. The library keeps only the
 * chosen instruction set, pools (threads and memory) and jobs until they are freed, and the table of mapped files. Only
 * the handler of SIGBUS prints. Every function may be called from many threads at once.
 *
 * docs/explanation/numerics.md defines the numbers, docs/reference/bytes.md the layout of the bytes. Python (cffi,
 * _build.py) reads the text between the two markers, which is plain C with no directive except `#define NAME NUMBER`.
 */
#ifndef KTQ_H
#define KTQ_H

#include <stddef.h>
#include <stdint.h>

/* cdef begin */

/* Error codes; ktq_strerror describes them. */
enum {
    KTQ_OK,
    KTQ_EINVAL,
    KTQ_ESHAPE,
    KTQ_EISA,
    KTQ_ENONFINITE,
    KTQ_ESYSTEM,
    KTQ_ENOMEM,
    KTQ_ECLOSED,
    KTQ_EFORK,
    KTQ_ERANGE
};

/* The encodings of a source. */
enum {
    KTQ_BF16,
    KTQ_FP16,
    KTQ_F32,
    KTQ_FP8_E4M3,
    KTQ_INT4,
    KTQ_INT8,
    KTQ_FP4_E2M1,
    KTQ_INT8_SIGNED,
    KTQ_INT4_AWQ,
    KTQ_Q4_0,
    KTQ_Q8_0,
    KTQ_Q4_K,
    KTQ_Q5_K,
    KTQ_Q6_K,
    KTQ_GGML_MXFP4
};

/* One linear [n, k] as it is stored; element (r, c) is at values + r*row_stride + c*column_stride (bytes, any
   alignment). One of the two strides is the size of an element. FP8, FP4 and integers only: element (r, c) is
   multiplied by scales[g], g = (first_row + r) / block_rows * scales_per_row + (first_column + c) / block_columns.

   FP4 and integers: the first `skip` columns are ignored. A byte of 4-bit codes has the even column in its lower half.
   Integers: codes are unsigned; zeros[g] (2^(bits-1) if zeros is NULL) is subtracted before the scale is multiplied.
   If column_groups is not NULL, g uses column_groups[first_column + c] instead of (first_column + c) / block_columns.
   INT8_SIGNED: codes are two's complement; the unsigned code is 128 more.
   INT4, INT8: with column_stride 1 or 4 the bytes of a row are contiguous. Otherwise 32-bit words, low bits first, are
   column_stride apart, and row_stride is 4.
   INT4_AWQ: a word holds one column of 8 rows, in the order 0 2 4 6 1 3 5 7 from the low bits up. Words of one column
   are contiguous (row_stride 4), columns are column_stride apart. The first `skip` rows are ignored.
   Types of ggml: whole blocks, which contain their scales; the first `skip` columns are ignored. */
typedef struct {
    int kind;
    const void *values;
    int64_t row_stride, column_stride;
    const float *scales;
    int64_t scales_per_row;
    int64_t block_rows, block_columns;
    int64_t first_row, first_column;
    int64_t skip;
    const float *zeros;
    const int32_t *column_groups;
} ktq_source;

/* n of a packed weight is a multiple of ktq_block_rows, k of ktq_tile_columns. Both return 0 for unsupported bits. */
int64_t ktq_block_rows(int bits);
int64_t ktq_tile_columns(int bits);

/* Quantizes to `bits` (4 or 8), one scale per row, and packs. n and k: multiples of ktq_block_rows and
   ktq_tile_columns. scratch: 32*k uint16, best on a boundary of 64 bytes; weight: n*k*bits/8 bytes; scale: n floats.
   KTQ_ENONFINITE: *bad_row is the first row with an infinity or a NaN; weight and scale are then partly written. */
int ktq_quantize_pack(int bits, int64_t n, int64_t k, const ktq_source *source, uint16_t *scratch, uint8_t *weight,
                      float *scale, int64_t *bad_row);

/* Packs codes[n][k], rows row_stride bytes apart: -7..7 (4 bits) or -127..127 (8 bits). weight: n*k*bits/8 bytes.
   KTQ_ERANGE: *bad_row is the first row with a code outside this range; weight is then partly written. */
int ktq_pack_codes(int bits, int64_t n, int64_t k, const int8_t *codes, int64_t row_stride, uint8_t *weight,
                   int64_t *bad_row);

/* The same as ktq_quantize_pack for kt-kernel's MOE_INT8 (8) and MOE_INT4 (4) in their plain order. */
int ktq_quantize_plain(int bits, int64_t n, int64_t k, const ktq_source *source, uint16_t *scratch, uint8_t *weight,
                       float *scale, int64_t *bad_row);

/* Chooses codes and a scale for each row of n x k BF16 values by least squared error (numerics.md, section 2b). rows,
   row_stride (bytes): any alignment. bits: 4 or 8; k: a multiple of 64. importance[k]: a weight of each column, not
   negative; NULL: all columns weigh the same. moments: second moments [k][k], rows moments_stride floats apart, with
   `importance` as diagonal (section 2e); or NULL. scratch: 3*k floats on a boundary of 64 bytes. vectors:
   KTQ_VECTOR_FLOATS * k floats; used only with moments. codes[n][k]: -7..7 or -127..127, for ktq_pack_codes; scale: n
   floats. KTQ_ENONFINITE: *bad_row is the first row that holds an infinity or a NaN; codes and scale are then partly
   written. */
int ktq_search_scales(int bits, int64_t n, int64_t k, const uint8_t *rows, int64_t row_stride, const float *importance,
                      const float *moments, int64_t moments_stride, float *scratch, float *vectors, int8_t *codes,
                      float *scale, int64_t *bad_row);
enum { KTQ_VECTOR_FLOATS = 128 };

/* Grids of ktq_search_groups, which have a scale for each 32 columns. */
enum { KTQ_GROUPS_MXFP4, KTQ_GROUPS_RAWINT4 };

/* Chooses codes and a scale for each 32 columns of n x k BF16 values by least squared error (numerics.md, section 2d).
   rows, row_stride (bytes): any alignment. importance, moments, vectors: as above. scratch: k floats. codes[n][k];
   scales: n * k / 32 as the grid stores them (MXFP4: E8M0, RAWINT4: BF16). KTQ_ENONFINITE: *bad_row is the first row
   that holds an infinity or a NaN; codes and scales are then partly written. */
int ktq_search_groups(int grid, int64_t n, int64_t k, const uint8_t *rows, int64_t row_stride, const float *importance,
                      const float *moments, int64_t moments_stride, float *scratch, float *vectors, int8_t *codes,
                      uint8_t *scales, int64_t *bad_row);

/* How x / scale is rounded: to BF16, as llmcompressor's round to nearest does, or to float32. KTQ_SIGNED: to float32,
   with scales of either sign, by which the largest value of a group gets the code -8; for 4 bits. */
enum { KTQ_LIBRARY, KTQ_FLOAT32, KTQ_SIGNED };

/* Quantizes to `bits` (4 or 8), one BF16 scale per `group` columns of a row, and packs codes in the order of the
   columns, low bits first. group: a multiple of 32 that divides k; n: any. scratch: 32*k uint16, best on a boundary of
   64 bytes; packed: n*k*bits/8 bytes; scale: n*k/group BF16. KTQ_ENONFINITE: *bad_row is the first row that holds an
   infinity or a NaN; packed and scale are then partly written. */
int ktq_quantize_groups(int bits, int64_t group, int rounding, int64_t n, int64_t k, const ktq_source *source,
                        uint16_t *scratch, uint8_t *packed, uint16_t *scale, int64_t *bad_row);

/* The inner loop of GPTQ: quantizes the columns of a block from left to right, and corrects the columns to the right of
   each. Codes are the integers least..most (-128 <= least <= 0 <= most <= 127): all of them if precision is 0, else
   those of at most `precision` (1 to 7) significant bits. Rows do not depend on each other. NaN stays NaN.
   kind: type of the scales before they became float32, KTQ_BF16 or KTQ_F32; values are rounded to it.
   width: at most KTQ_GPTQ_COLUMNS.
   The arrays are float32 in row order, and no two may share memory:
     inverse[width][width]  read: the block's factor of the inverse Hessian; only its upper triangle is used
     scale[n][width]        read
     weight[n][width]       read, and overwritten with the corrected weights
     value[n][width]        written: the dequantized codes
     error[n][width]        written */
enum { KTQ_GPTQ_COLUMNS = 128 };
int ktq_gptq_block(int least, int most, int precision, int kind, int64_t n, int64_t width, const float *inverse,
                   const float *scale, float *weight, float *value, float *error);

/* Runs GPTQ on all columns of n rows, and computes the gradient of the remaining error, (weight - value) * H
   (numerics.md, section 7b). Codes as in ktq_gptq_block; k: a multiple of KTQ_SLICE_COLUMNS. Rows do not depend on each
   other. The arrays are float32:
     slices[k / 16][k][16]  read, in slices of columns: the factor U of the inverse of H on and above the diagonal,
                            U_ji / U_jj below it
     scale[n][k]            read: the scale of each weight
     weight[n][k]           read, and overwritten with the dequantized codes
     gradient[n][k]         written
     scratch                64 * k numbers on a boundary of 64 bytes */
enum { KTQ_SLICE_COLUMNS = 16 };
int ktq_compensate(int least, int most, int precision, int64_t n, int64_t k, const float *slices, const float *scale,
                   float *weight, float *gradient, float *scratch);

/* One sweep of coordinate descent over the codes of a linear (numerics.md, section 7b), columns from left to right.
   Codes as in ktq_gptq_block. Rows do not depend on each other. *changed: number of changed codes. Codes whose scale is
   0, or whose diagonal is not positive, stay. The arrays are float32 in row order:
     hessian[k][k]          symmetric
     diagonal[k]            the diagonal of hessian
     scale[n][k / group]
     gradient[n][k]         (weight - codes * scale) * hessian; updated with each changed code */
int ktq_descend(int least, int most, int precision, int64_t n, int64_t k, int64_t group, const float *hessian,
                const float *diagonal, const float *scale, int8_t *codes, float *gradient, int64_t *changed);

/* n and k of a weight in panels of 32 rows (bytes.md, Panels) are multiples of these. */
enum { KTQ_BF16_MULTIPLE = 32, KTQ_MXFP4_MULTIPLE = 64, KTQ_FP8_MULTIPLE = 128 };

/* Orders of codes: in panels; row after row; and, for BF16, kt-kernel's order: row blocks of 256 rows, in them column
   blocks of 1792 columns, each in panels. The last blocks may be smaller. */
enum { KTQ_PANELS, KTQ_ROWS, KTQ_BLOCKS };
enum { KTQ_BF16_BLOCK_ROWS = 256, KTQ_BF16_BLOCK_COLUMNS = 1792 };

/* The source as BF16. scratch: 32*k uint16, best on a boundary of 64 bytes; codes: n*k BF16.
   KTQ_ENONFINITE: *bad_row is the first row that holds an infinity or a NaN; codes are then partly written. */
int ktq_pack_bf16(int order, int64_t n, int64_t k, const ktq_source *source, uint16_t *scratch, uint16_t *codes,
                  int64_t *bad_row);

/* The source as MXFP4 (numerics.md, section 9), in panels; a source that has E2M1 codes and an E8M0 scale for each 32
   columns keeps them. scratch: 32*k uint16, best on a boundary of 64 bytes; codes: n*k/2 bytes; exponents: n*k/32.
   KTQ_ENONFINITE: *bad_row is the first row that holds an infinity or a NaN; the outputs are then undefined. */
int ktq_pack_mxfp4(int64_t n, int64_t k, const ktq_source *source, uint16_t *scratch, uint8_t *codes,
                   uint8_t *exponents, int64_t *bad_row);
/* MXFP4 in panels to rows [n][k/2], the even column in the lower half of a byte, and exponents [n][k/32]. */
int ktq_mxfp4_rows(int64_t n, int64_t k, const uint8_t *codes, const uint8_t *exponents, uint8_t *rows,
                   uint8_t *row_exponents);

/* The source as FP8 E4M3, with a scale for each block of 128 x 128. Codes and scales of an FP8 source with such blocks
   are copied; it must begin at the beginning of a block. scratch: 128*k uint16, best on a boundary
   of 64 bytes; codes: n*k bytes; scales: n/128 * k/128 floats. KTQ_ENONFINITE: *bad_row is the first row that holds an
   infinity or a NaN; codes and scales are then partly written. */
int ktq_pack_fp8(int order, int64_t n, int64_t k, const ktq_source *source, uint16_t *scratch, uint8_t *codes,
                 float *scales, int64_t *bad_row);

/* Brings blocks of ggml (KTQ_Q4_0, KTQ_Q8_0, KTQ_Q4_K, KTQ_Q5_K, KTQ_Q6_K) into the panels of the KTQ_FORMAT_* of the
   same name. ktq_weight_bytes tells which n and k are valid, and the sizes of codes and scales. rows: n rows,
   row_stride bytes apart, whose first `skip` columns are ignored; skip must be as valid as k. KTQ_ENONFINITE: a scale
   of row *bad_row is infinite or NaN; codes and scales are then partly written. */
int ktq_reorder_ggml(int kind, int64_t n, int64_t k, int64_t skip, const uint8_t *rows, int64_t row_stride,
                     uint8_t *codes, uint8_t *scales, int64_t *bad_row);

/* Brings codes of FP8 E4M3 into panels. n and k: multiples of 32. rows: n rows, row_stride bytes apart.
   KTQ_ENONFINITE: a code of row *bad_row is NaN. */
int ktq_reorder_fp8(int64_t n, int64_t k, const uint8_t *rows, int64_t row_stride, uint8_t *codes, int64_t *bad_row);

/* The source as BF16: out[n][k]. A NaN of FP16 or F32 becomes 0x7fc0, one of FP8 0x7fc0 with the code's sign. */
int ktq_decode(int64_t n, int64_t k, const ktq_source *source, uint16_t *out);

/* Unpacks and multiplies: out[n][k]. */
int ktq_dequantize(int bits, int64_t n, int64_t k, const uint8_t *weight, const float *scale, float *out);

/* sums = {sum x*x, sum y*y, sum x*y, sum (x-y)*(x-y)}; x: the source as BF16, y: the dequantized weight.
   Added in float64 in one fixed order on every instruction set. scratch: 32*k uint16. */
int ktq_error_sums(int bits, int64_t n, int64_t k, const ktq_source *source, uint16_t *scratch, const uint8_t *weight,
                   const float *scale, double *sums);

/* --- the runtime: forwards with packed experts -------------------------------------------------------------------- */

enum {
    KTQ_POOL_THREADS = 4096, /* largest number of threads */
    KTQ_CPU_BYTES = 128,     /* bytes of a set of CPUs: one bit for each of the CPUs 0 to 1023, lowest bit first */
};
/* Threads that compute forwards together: threads[g] threads for each of `groups` groups (NUMA nodes). cpus
   [threads][KTQ_CPU_BYTES]: the set of CPUs of each thread, group by group. cpus may be NULL and a set empty: then the
   thread is not pinned. If something else moves a thread (taskset, a cpuset), it stays there during the forward, and
   returns to its own CPUs between forwards as soon as it is allowed to. The caller of ktq_forward is the first thread
   of group 0: it is pinned if possible, and unpinned at the end. A pool runs one forward at a time; other callers wait.
   A child made by fork() starts its own threads. */
typedef struct ktq_pool ktq_pool;
int ktq_pool_new(int groups, const int *threads, const uint8_t *cpus, ktq_pool **pool);
/* ktq_pool_close finishes the submitted jobs and ends the threads; later forwards and jobs end with KTQ_ECLOSED.
   ktq_pool_free also frees the pool; after it, only jobs that are not pending may still refer to the pool. */
void ktq_pool_close(ktq_pool *pool);
void ktq_pool_free(ktq_pool *pool);

/* The formats of experts. docs/reference/bytes.md describes those up to BF16: scales are float32 (AMXINT4, AMXINT8,
   FP8), E8M0 (MXFP4) or absent (BF16). The formats after BF16 exist only in memory. Codes of FP8_PERCHANNEL, MXFP8 and
   Q8_0 are in the order of FP8, those of F16 in the order of BF16, the others in that of MXFP4. The scales of a panel
   are stored by groups of columns, 32 rows for each group.

   format          codes              scales
   FP8_PERCHANNEL  E4M3               float32 for each row
   MXFP8           E4M3               E8M0 for each row and 32 columns
   NVFP4           as MXFP4           KTQ_NVFP4_HEADER bytes, whose first 4 are the float32 scale of the whole weight;
                                      then E4M3 for each row and 16 columns
   RAWINT4         two's complement   BF16 for each row and 32 columns
   GPTQ_INT4       two's complement   float32 for each row and 128 columns (GPTQ_INT4_64: 64, GPTQ_INT4_32: 32)
   Q4_0, Q8_0      two's complement   FP16 for each row and 32 columns
   Q4_K, Q5_K      unsigned           for each 128 columns (half a block) of 32 rows: FP16 scales, FP16 scales of the
                                      least values; then, for each 32 columns, bytes that multiply the former, and
                                      bytes that multiply the latter
   Q6_K            code + 32          for each 128 columns of 32 rows: FP16 scales, then signed bytes for each 16
                                      columns
   F16             FP16               none

   Codes of 5 and 6 bits: each block of 16 rows and 32 columns has the lower bits first, then words of the upper bits
   (convert/reorder_ggml.c). */
enum {
    KTQ_FORMAT_AMXINT4,
    KTQ_FORMAT_AMXINT8,
    KTQ_FORMAT_MXFP4,
    KTQ_FORMAT_FP8,
    KTQ_FORMAT_BF16,
    KTQ_FORMAT_FP8_PERCHANNEL,
    KTQ_FORMAT_MXFP8,
    KTQ_FORMAT_NVFP4,
    KTQ_FORMAT_RAWINT4,
    KTQ_FORMAT_GPTQ_INT4,
    KTQ_FORMAT_GPTQ_INT4_64,
    KTQ_FORMAT_GPTQ_INT4_32,
    KTQ_FORMAT_Q4_0,
    KTQ_FORMAT_Q8_0,
    KTQ_FORMAT_Q4_K,
    KTQ_FORMAT_Q5_K,
    KTQ_FORMAT_Q6_K,
    KTQ_FORMAT_F16
};
enum { KTQ_K_COLUMNS = 128, KTQ_K_SCALE_BYTES = 2 + 2 + 4 + 4, KTQ_Q6_K_SCALE_BYTES = 2 + 8 };
enum { KTQ_NVFP4_HEADER = 64 };
/* Limits: NUMA slices of a layer, experts of a token, hidden size and columns of a slice (int32 sums grow by at most
   255 * 127 with each column). */
enum { KTQ_MAX_SLICES = 64, KTQ_MAX_TOPK = 4096, KTQ_MAX_COLUMNS = 65536 };

/* Sizes in bytes of the codes and scales of a weight [n, k]. KTQ_EINVAL: unknown format, or too many columns.
   KTQ_ESHAPE: n or k is not a multiple of the format's block. */
int ktq_weight_bytes(int format, int64_t n, int64_t k, int64_t *codes, int64_t *scales);

/* One NUMA slice of one packed expert: gate and up [width, hidden], down [hidden, width]. Scales are NULL if the format
   has none, biases and gate if the experts have none. Only one slice of an expert has down's bias. */
typedef struct {
    const void *gate, *up, *down;
    const void *gate_scale, *up_scale, *down_scale;
    const float *gate_bias, *up_bias, *down_bias;
} ktq_expert;

/* What experts compute: down(f(gate x + bias, up x + bias)) + bias. The activations f are defined in
   layouts/checkpoints/expert_function.py. limit 0: no limit. beta 0: softcap does not cap up. */
enum {
    KTQ_SILU,
    KTQ_SWIGLU_STEP,
    KTQ_SWIGLU_OAI,
    KTQ_SOFTCAP,
    KTQ_GELU_TANH,
    KTQ_GELU_ERF,
    KTQ_RELU,
    KTQ_RELU2
};
typedef struct {
    int activation;
    float limit, alpha, beta;
    int ungated;          /* 1: there is no gate, and the activation is f(up x + bias, 1) */
    int weights_on_input; /* 1: the routing weight multiplies an expert's input, not its output */
} ktq_function;

/* The routed experts of a layer: expert[slice * experts + expert]. width[slice]: columns of the intermediate size in a
   NUMA slice; with int8 activations all slices have the same width. */
typedef struct {
    int gate_format, up_format, down_format; /* KTQ_FORMAT_*; int8 arithmetic: the same; BF16 arithmetic: any */
    int64_t experts, slices, hidden, width[KTQ_MAX_SLICES];
    const ktq_expert *expert;
    ktq_function function;
    /* missing[expert]: 1 for an expert whose weights are not in memory yet; NULL if all are. Before a pass computes
       such experts, it calls load(context, their number, the experts), which loads them and clears the marks; no other
       pass runs on the pool meanwhile. */
    const uint8_t *missing;
    void (*load)(void *context, int64_t count, const int64_t *experts);
    void *context;
    /* 1: weights are in mapped files that exceed the memory. A pass requests the pages of all its experts before it
       computes, so that the disk reads them in parallel. */
    int read_ahead;
    /* Packed transposes of all weights, in the same formats, for the backward; it then quantizes gradients as the
       forward quantizes activations. NULL: the backward transposes `expert` itself, and multiplies in BF16. */
    const ktq_expert *transposed;
} ktq_moe;

/* out[t] = the sum over j of weights[t][j] * expert ids[t][j] (hidden[t]). hidden, out: BF16 [tokens, hidden];
   ids, weights: [tokens, topk]. Ids are ignored if they are negative, not below `experts`, or marked in skip[experts]
   (which may be NULL). add: 1 to add the sum to the contents of out (rounded once, at the end), 0 to overwrite it. */
typedef struct {
    int exact; /* 1: round where kt-kernel rounds; 0: round less. AMXINT4 and AMXINT8 only */
    /* Bit f is 1: weights in format f, if they are integers of 4 to 6 bits, are multiplied with activations of 8 bits;
       gate and up only if the bits of both are 1. */
    uint32_t int8_formats;
    int64_t tokens, topk;
    const uint16_t *hidden;
    const int64_t *ids;
    const float *weights;
    const uint8_t *skip;
    uint16_t *out;
    int add;
    /* Factors [hidden] of an expert's output, which is then divided by the root of its mean square + norm_epsilon, and
       only then weighted. NULL: outputs are not normalized. Training has no norm. */
    const float *norm;
    float norm_epsilon;
} ktq_call;

int ktq_forward(ktq_pool *pool, const ktq_moe *moe, const ktq_call *call);

/* out[t] = weight x[t] + bias, rounded to BF16 once (numerics.md, section 5e): weight [n, k] in BF16 as checkpoints
   have it, x [tokens, k], out [tokens, n]; bias may be NULL. tokens: 1 to KTQ_ROW_TOKENS. k: a multiple of
   KTQ_ROW_MULTIPLE. */
enum { KTQ_ROW_TOKENS = 4, KTQ_ROW_MULTIPLE = 32 };
int ktq_multiply_rows(ktq_pool *pool, int64_t tokens, int64_t n, int64_t k, const uint16_t *weight,
                      const uint16_t *bias, const uint16_t *x, uint16_t *out);
/* The same with int8 codes [n, k], and scales [n, k / KTQ_ROW_MULTIPLE] in BF16. */
int ktq_multiply_int8_rows(ktq_pool *pool, int64_t tokens, int64_t n, int64_t k, const int8_t *codes,
                           const uint16_t *scales, const uint16_t *bias, const uint16_t *x, uint16_t *out);

/* Attention of one token (numerics.md, section 5f), in BF16: out [heads][queries][value_size]. `queries` heads share
   the keys and values of one of `heads`. q: [heads][queries][size]. k, v: [keys][size] and [keys][value_size] of each
   head; those of the next head are key_stride and value_stride numbers further. scale: factor of the products. size,
   value_size: multiples of KTQ_ROW_MULTIPLE. */
typedef struct {
    int64_t heads, queries, keys, size, value_size, key_stride, value_stride;
    float scale;
    const uint16_t *q, *k, *v;
    uint16_t *out;
} ktq_attention;
int ktq_attend(ktq_pool *pool, const ktq_attention *attention);

/* LoRA of a layer's experts (numerics.md, section 5c), in the order gate, up, down; a: [experts][rank][columns], b:
   [experts][rows][rank], BF16 or float32. dropout: the fraction of the inputs of `a` that become 0, chosen by seed. */
typedef struct {
    int float32;
    int64_t rank;
    float scaling, dropout;
    uint64_t seed;
    const void *a[3], *b[3];
} ktq_lora;
enum { KTQ_MAX_RANK = 1024 };

/* Activations that the forward saves for the backward, BF16. rows = tokens * topk; columns: of all NUMA slices.
   rank_rows: the products with LoRA's `a`; NULL without LoRA. */
typedef struct {
    uint16_t *gate, *up, *act; /* [rows][columns] */
    uint16_t *down;            /* [slices][rows][hidden] */
    uint16_t *rank_rows;       /* [gate, up, and down of each slice][rows][2 * ktq_rank_columns(rank)] */
} ktq_activations;
int64_t ktq_rank_columns(int64_t rank);

/* Gradients of a backward:
     out      read: the output's, BF16 [tokens][hidden]
     hidden   written: the input's, BF16 [tokens][hidden]
     weights  written: the router weights', [tokens][topk]
     a, b     written: those of LoRA's factors, in their type and layout, times `scale`; experts without tokens are
              skipped */
typedef struct {
    const uint16_t *out;
    uint16_t *hidden;
    float *weights;
    float scale;
    void *a[3], *b[3];
} ktq_gradients;

/* Whether gradients can be computed: no format has least values or two terms, and weights are on the output. */
int ktq_trainable(const ktq_moe *moe);
/* ktq_forward with LoRA (lora may be NULL), and its gradients. KTQ_EINVAL if ktq_trainable returns 0. call->add and
   call->exact are ignored. The backward takes the same call, lora and saved activations; it ignores call->out. */
int ktq_train_forward(ktq_pool *pool, const ktq_moe *moe, const ktq_call *call, const ktq_lora *lora,
                      const ktq_activations *saved);
int ktq_train_backward(ktq_pool *pool, const ktq_moe *moe, const ktq_call *call, const ktq_lora *lora,
                       const ktq_activations *saved, const ktq_gradients *gradients);

/* How ktq_copy_rows turns a tensor in memory (panels: bytes.md) into rows of items. */
enum {
    KTQ_PANEL_BYTES,          /* panels of 1-byte numbers */
    KTQ_PANEL_HALVES,         /* panels of 2-byte numbers */
    KTQ_PANEL_NIBBLES,        /* panels of bytes with two codes each, as in MXFP4 */
    KTQ_PANEL_OFFSET_NIBBLES, /* the same; the highest bit of each code is flipped (offset binary) */
    KTQ_PANEL_SCALES,         /* 2-byte scales for each row of a panel, group after group */
    KTQ_PANEL_SCALE_BYTES,    /* the same with 1-byte scales */
    KTQ_PANEL_EXPONENTS,      /* the same with E8M0 scales, which become BF16 */
    KTQ_IN_ROWS               /* rows of bytes, copied unchanged */
};

/* A rectangle of `rows` x `columns` items. From panels: whole panels, and whole blocks of 32 columns. from_stride:
   bytes from one panel (KTQ_IN_ROWS: row) to the next; row_stride: bytes from one row of `to` to the next. */
typedef struct {
    int order;
    int64_t rows, columns, from_stride, row_stride;
    const void *from;
    void *to;
} ktq_rectangle;

int ktq_copy_rows(ktq_pool *pool, int64_t count, const ktq_rectangle *rectangle);

/* Forwards and copies in the background: a pool runs submitted jobs in their order. A job may be submitted again after
   ktq_job_wait. cudaLaunchHostFunc can call submit and wait. moe and call are copied, but not the memory that they
   point to, nor the rectangles. In a child made by fork() a pending job ends with KTQ_EFORK, and can be submitted
   again. ktq_job_wait returns at once if the job is not pending; ktq_job_result returns the error code of the last
   run. */
typedef struct ktq_job ktq_job;
int ktq_job_new(ktq_pool *pool, const ktq_moe *moe, const ktq_call *call, ktq_job **job);
int ktq_copy_job_new(ktq_pool *pool, int64_t count, const ktq_rectangle *rectangle, ktq_job **job);
void ktq_job_submit(void *job);
void ktq_job_wait(void *job);
int ktq_job_result(const ktq_job *job);
void ktq_job_free(ktq_job *job);

/* NUMA nodes of memory. KTQ_ESYSTEM: the kernel refused (errno has the reason). address: the beginning of a page.
   ktq_place_memory: new pages go to these nodes in turn, if they have room.
   ktq_gather_memory: pages on other nodes move to this node, if it has room.
   ktq_memory_policy: the calling thread's policy, MPOL_* in *mode, its nodes as bits of nodes[KTQ_NODE_WORDS]. */
#define KTQ_NODE_WORDS 16
int ktq_place_memory(void *address, size_t length, int count, const int *nodes);
int ktq_gather_memory(void *address, size_t length, int node);
int ktq_memory_policy(int *mode, uint64_t *nodes);

/* Reads each line of `bytes` bytes once, in 1, 2 or 4 streams of equal length that are read side by side.
   *sum: the exclusive or of the first 8 bytes of each 64 (fewer at the end), in the machine's byte order. */
int ktq_read(int streams, int64_t bytes, const void *from, uint64_t *sum);

const char *ktq_compiler(void); /* compiler of this library, such as "gcc 12.2.0" */

/* Instruction sets, worst first: 0 "scalar" .. ktq_isa_count() - 1 "amx". */
int ktq_isa_count(void);
const char *ktq_isa_name(int isa);
int ktq_isa_available(int isa); /* supported by this CPU and operating system */
int ktq_isa(void);              /* the set in use; by default the best available one */
int ktq_set_isa(int isa);       /* -1: the best available one. KTQ_EISA: not available */

/* The rows of kernels.def: family and instruction set (a number as above, -1 past the end). */
int ktq_kernel_isa(int row);
const char *ktq_kernel_family(int row);
/* The kernels in use, a kt_kernels (kernels.h), for measuring or testing a single kernel. */
const void *ktq_kernels(void);

/* Handling of SIGBUS, which a page of a mapped file raises that cannot be read.
   ktq_guard_sigbus: from now on, print `sentence` to stderr, with the file's name for its %s, and _exit(code). Other
   faults, and signals sent by processes, go to the previous handler.
   Without ktq_guard_sigbus, a mapping with may_lose reads as zeros from the unreadable page on.
   ktq_lost: the file's name if some of these bytes became zeros, else NULL. ktq_any_lost: 1 if any ever did. */
int ktq_guard_sigbus(const char *sentence, int code);
int ktq_register_mapping(const void *address, size_t length, const char *name, int may_lose);
const char *ktq_lost(const void *address, size_t length);
int ktq_any_lost(void);
int ktq_unregister_mapping(const void *address);

const char *ktq_strerror(int error);

/* cdef end */

#endif
