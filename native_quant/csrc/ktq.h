/* ktq: linears in any encoding to packed experts (AMXINT4, AMXINT8, MXFP4, FP8, BF16), codes and scales of other
 * quantizers, and the forward of routed experts in these formats.
 *
 * Conversions are buffers in, buffers out: they allocate, print and keep nothing. What is kept: the choice of
 * instruction set; pools with their threads and memory, and jobs, until they are freed; the table of mapped files. Only
 * the handler of SIGBUS prints. Every function may be called from many threads at once. What the numbers mean:
 * docs/explanation/numerics.md. The layout of the bytes: docs/reference/bytes.md. Python (cffi, _build.py) reads the
 * text between the two markers: plain C without directives but `#define NAME NUMBER`.
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

   FP4 and integers: of 4 bits, the even column is the lower half of a byte. `skip` columns come before the first.
   Integers: codes are unsigned; zeros[g], or 2^(bits-1) where zeros is NULL, is subtracted before the scale is
   multiplied. INT8_SIGNED: codes are two's complement; the unsigned code is 128 more. Where group_of is not NULL,
   group_of[first_column + c] takes the place of (first_column + c) / block_columns.
   INT4, INT8: column_stride 1 or 4: the bytes of a row lie one after the other. Else words of 32 bits, low bits first,
   are column_stride apart, and row_stride is 4.
   INT4_AWQ: a word holds a column of 8 rows, in the order 0 2 4 6 1 3 5 7 from the low bits up; words of one column
   follow each other (row_stride 4), columns are column_stride apart. `skip` rows come before the first.
   Types of ggml: whole blocks with their scales in them; `skip` as for integers. */
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
    const int32_t *group_of;
} ktq_source;

/* n and k of a packed weight are multiples of these, by the bits of its codes; 0: unsupported bits. */
int64_t ktq_block_rows(int bits);
int64_t ktq_tile_columns(int bits);

/* Quantizes to `bits` (4 or 8), one scale per row, and packs. n and k: multiples of ktq_block_rows and
   ktq_tile_columns. scratch: 32*k uint16, best on a boundary of 64 bytes; weight: n*k*bits/8 bytes; scale: n floats.
   KTQ_ENONFINITE: *bad_row is the first row that holds an infinity or a NaN; weight and scale are then partly written.
 */
int ktq_quantize_pack(int bits, int64_t n, int64_t k, const ktq_source *source, uint16_t *scratch, uint8_t *weight,
                      float *scale, int64_t *bad_row);

/* Packs codes[n][k], rows row_stride bytes apart: -7..7 (4 bits) or -127..127 (8 bits). weight: n*k*bits/8 bytes.
   KTQ_ERANGE: *bad_row is the first row that holds another code; weight is then partly written. */
int ktq_pack_codes(int bits, int64_t n, int64_t k, const int8_t *codes, int64_t row_stride, uint8_t *weight,
                   int64_t *bad_row);

/* The same as ktq_quantize_pack for kt-kernel's MOE_INT8 (8) and MOE_INT4 (4) in their plain order. */
int ktq_quantize_plain(int bits, int64_t n, int64_t k, const ktq_source *source, uint16_t *scratch, uint8_t *weight,
                       float *scale, int64_t *bad_row);

/* Chooses codes and a scale for each row of n x k BF16 values by least squared error (numerics.md, section 2b). rows,
   row_stride (bytes): any alignment. bits: 4 or 8; k: a multiple of 64.
   importance[k]: of each column, none negative; NULL: all alike. moments: second moments [k][k] whose rows begin
   moments_stride floats apart, and whose diagonal is `importance`: section 2e; NULL: none. scratch: 3*k floats on a
   boundary of 64 bytes. vectors: with moments, KTQ_VECTOR_FLOATS * k floats.
   codes[n][k]: -7..7 or -127..127, for ktq_pack_codes; scale: n floats. KTQ_ENONFINITE: *bad_row is the first row that
   holds an infinity or a NaN; codes and scale are then partly written. */
int ktq_search_scales(int bits, int64_t n, int64_t k, const uint8_t *rows, int64_t row_stride, const float *importance,
                      const float *moments, int64_t moments_stride, float *scratch, float *vectors, int8_t *codes,
                      float *scale, int64_t *bad_row);
enum { KTQ_VECTOR_FLOATS = 128 };

/* Grids with a scale for each 32 columns: the number of one for ktq_search_groups. */
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

/* The inner loop of GPTQ: quantizes the columns of a block one after the other to codes, and corrects those to the
   right of each. Codes are the integers least..most (-128 <= least <= 0 <= most <= 127) of at most `precision`
   significant bits, 1 to 7, or all of them (0). float32, row after row: inverse[width][width], the block's factor of
   the inverse Hessian, of which the upper triangle is read; scale[n][width]; weight[n][width], which becomes what the
   corrections leave of it; value[n][width], what the codes stand for, and error[n][width], are written. kind:
   the type of the scales before they became float32, KTQ_BF16 or KTQ_F32; values are rounded to it. NaN stays NaN. No
   two arrays may share memory. width: at most KTQ_GPTQ_COLUMNS. Rows do not depend on each other. */
enum { KTQ_GPTQ_COLUMNS = 128 };
int ktq_gptq_block(int least, int most, int precision, int kind, int64_t n, int64_t width, const float *inverse,
                   const float *scale, float *weight, float *value, float *error);

/* All columns of rows by GPTQ, and the gradient of the errors that it leaves, (weight - value) * H (numerics.md,
   section 7b). Codes as in ktq_gptq_block. float32: slices[k / 16][k][16], in slices of columns: the factor U of the
   inverse of H in and above the diagonal, and below it U_ji / U_jj. Row after row: scale[n][k], of each weight;
   weight[n][k], which becomes the values that the codes stand for; gradient[n][k], which is written. k: a multiple of
   KTQ_SLICE_COLUMNS. scratch: 64 * k float32 on a boundary of 64 bytes. Rows do not depend on each other. */
enum { KTQ_SLICE_COLUMNS = 16 };
int ktq_compensate(int least, int most, int precision, int64_t n, int64_t k, const float *slices, const float *scale,
                   float *weight, float *gradient, float *scratch);

/* One sweep of coordinate descent over the codes of a linear (numerics.md, section 7b), columns from left to right.
   Codes as in ktq_gptq_block. float32, row after row: hessian[k][k], symmetric, and its diagonal[k]; scale[n][k /
   group], where 0 and columns whose diagonal is not positive keep their codes; gradient[n][k], (weight - codes * scale)
   * hessian, which is kept up. *changed: how many codes changed. Rows do not depend on each other. */
int ktq_descend(int least, int most, int precision, int64_t n, int64_t k, int64_t group, const float *hessian,
                const float *diagonal, const float *scale, int8_t *codes, float *gradient, int64_t *changed);

/* n and k of a weight in panels of 32 rows (bytes.md, Panels) are multiples of these. */
enum { KTQ_BF16_MULTIPLE = 32, KTQ_MXFP4_MULTIPLE = 64, KTQ_FP8_MULTIPLE = 128 };

/* The order of codes: that of panels, or row after row. BF16 also has that of kt-kernel: row blocks of 256 rows, column
   blocks of 1792 columns, each in panels; the last ones may be smaller. */
enum { KTQ_PANELS, KTQ_ROWS, KTQ_BLOCKS };
enum { KTQ_BF16_BLOCK_ROWS = 256, KTQ_BF16_BLOCK_COLUMNS = 1792 };

/* The source as BF16. scratch: 32*k uint16, best on a boundary of 64 bytes; codes: n*k BF16.
   KTQ_ENONFINITE: *bad_row is the first row that holds an infinity or a NaN; codes are then partly written. */
int ktq_pack_bf16(int order, int64_t n, int64_t k, const ktq_source *source, uint16_t *scratch, uint16_t *codes,
                  int64_t *bad_row);

/* The source as MXFP4 (numerics.md, section 9), in panels; a source that has E2M1 codes and an E8M0 scale for each 32
   columns keeps them. scratch: 32*k uint16, best on a boundary of 64 bytes; codes: n*k/2 bytes; exponents: n*k/32.
   KTQ_ENONFINITE: *bad_row is the first row that holds an infinity or a NaN; what is written means nothing then. */
int ktq_pack_mxfp4(int64_t n, int64_t k, const ktq_source *source, uint16_t *scratch, uint8_t *codes,
                   uint8_t *exponents, int64_t *bad_row);
/* MXFP4 in panels to rows [n][k/2], the even column in the lower half of a byte, and exponents [n][k/32]. */
int ktq_mxfp4_rows(int64_t n, int64_t k, const uint8_t *codes, const uint8_t *exponents, uint8_t *rows,
                   uint8_t *row_exponents);

/* The source as FP8 E4M3, with a scale for each block of 128 x 128. A source of FP8 in blocks of that size is
   kept as it is, codes and scales; it must begin at the beginning of a block. scratch: 128*k uint16, best on a boundary
   of 64 bytes; codes: n*k bytes; scales: n/128 * k/128 floats. KTQ_ENONFINITE: *bad_row is the first row that holds an
   infinity or a NaN; codes and scales are then partly written. */
int ktq_pack_fp8(int order, int64_t n, int64_t k, const ktq_source *source, uint16_t *scratch, uint8_t *codes,
                 float *scales, int64_t *bad_row);

/* Blocks of ggml (KTQ_Q4_0, KTQ_Q8_0, KTQ_Q4_K, KTQ_Q5_K, KTQ_Q6_K) in panels, as KTQ_FORMAT_* of the same name has
   them, n and k as ktq_weight_bytes wants them. rows: n of them, row_stride bytes apart; `skip` columns, of which the
   same holds as of k, come before the first. codes, scales: as ktq_weight_bytes says. KTQ_ENONFINITE: a scale of row
   *bad_row is infinite or NaN; codes and scales are then partly written. */
int ktq_reorder_ggml(int kind, int64_t n, int64_t k, int64_t skip, const uint8_t *rows, int64_t row_stride,
                     uint8_t *codes, uint8_t *scales, int64_t *bad_row);

/* Codes of FP8 E4M3 in panels as they are, multiples of 32. rows: n of them, row_stride bytes apart. KTQ_ENONFINITE: a
   code of row *bad_row is NaN. */
int ktq_reorder_fp8(int64_t n, int64_t k, const uint8_t *rows, int64_t row_stride, uint8_t *codes, int64_t *bad_row);

/* The source as BF16: out[n][k]. A NaN of FP16 or F32 becomes 0x7fc0, one of FP8 0x7fc0 with the code's sign. */
int ktq_decode(int64_t n, int64_t k, const ktq_source *source, uint16_t *out);

/* Unpacks and multiplies: out[n][k]. */
int ktq_dequantize(int bits, int64_t n, int64_t k, const uint8_t *weight, const float *scale, float *out);

/* sums = {sum x*x, sum y*y, sum x*y, sum (x-y)*(x-y)}; x: the source as BF16, y: the dequantized weight.
   Added in float64 in one fixed order, whatever the instruction set. scratch: 32*k uint16. */
int ktq_error_sums(int bits, int64_t n, int64_t k, const ktq_source *source, uint16_t *scratch, const uint8_t *weight,
                   const float *scale, double *sums);

/* --- the runtime: what was packed, multiplied --------------------------------------------------------------------- */

enum {
    KTQ_POOL_THREADS = 4096, /* at most */
    KTQ_CPU_BYTES = 128,     /* of a set of CPUs: a bit each, the lowest first; CPUs from 1024 on cannot be named */
};
/* Threads that work together: for each of `groups` groups (NUMA nodes) threads[g] threads. Each keeps to its place, one
   of the sets of CPUs in `cpus` [threads][KTQ_CPU_BYTES] (group by group; NULL or none in it: wherever it is). Whoever
   moves a thread afterwards is obeyed, but it goes back to its place between forwards as soon as it may. The first
   thread of group 0 is the caller of ktq_forward: it comes to its place if it may, and gets its CPUs back in the end.
   A pool does one forward at a time; other callers wait. A child made by fork() starts threads of its own. */
typedef struct ktq_pool ktq_pool;
int ktq_pool_new(int groups, const int *threads, const uint8_t *cpus, ktq_pool **pool);
/* Does what was submitted, and ends the threads; from then on forwards and jobs end with KTQ_ECLOSED. ktq_pool_free
   also frees the pool: nothing may use it any more, a job that is not pending aside. */
void ktq_pool_close(ktq_pool *pool);
void ktq_pool_free(ktq_pool *pool);

/* The formats of experts (docs/reference/bytes.md). Their scales: float32 (AMXINT4, AMXINT8, FP8), E8M0 (MXFP4), none.
   Those after BF16 are in memory only. Codes of FP8_PERCHANNEL and MXFP8 are in the order of FP8, the others in that of
   MXFP4. Scales of a panel: groups of columns one after the other, each with its 32 rows.

   FP8_PERCHANNEL  float32 for each row
   MXFP8           as MXFP4
   NVFP4           KTQ_NVFP4_HEADER bytes, of which the first 4 are the float32 scale of the whole weight, then an E4M3
                   scale for each row and 16 columns
   RAWINT4         codes in two's complement; BF16 for each row and 32 columns
   GPTQ_INT4       the same codes; float32 for each row and 128 columns, or 64, or 32
   Q4_0, Q8_0      codes in two's complement, of Q8_0 in the order of FP8; FP16 for each row and 32 columns
   Q4_K, Q5_K      for each 128 columns (half a block) of the rows: their FP16 scales, the FP16 scales of least values,
                   and bytes for each 32 columns that multiply the ones, then those that multiply the others
   Q6_K            codes + 32; for each 128 columns of the rows: FP16 scales, then signed bytes for each 16 columns
   F16             FP16 in the order of BF16; no scales
   Of 5 and 6 bits, each 16 rows and 32 columns have their lower bits first, then words of the upper ones (convert/
   reorder_ggml.c). */
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
/* Limits: parts of a layer, experts of a token, hidden size and columns of a part (int32 sums: 255 * 127 a column). */
enum { KTQ_MOST_PARTS = 64, KTQ_MOST_TOPK = 4096, KTQ_MOST_COLUMNS = 65536 };

/* The bytes of the codes and of the scales that a forward reads of a weight [n, k]. KTQ_EINVAL: there is no such
   format, or too many columns; KTQ_ESHAPE: n or k is no multiple of what it must be. */
int ktq_weight_bytes(int format, int64_t n, int64_t k, int64_t *codes, int64_t *scales);

/* One part of one expert as it is packed: gate and up [width, hidden], down [hidden, width]. Scales are NULL where the
   format has none. */
typedef struct {
    const void *gate, *up, *down;
    const void *gate_scale, *up_scale, *down_scale;
} ktq_expert;

/* The routed experts of a layer: expert[part * experts + expert]. width: the columns of the intermediate size that each
 * part has, with int8 activations all the same. */
typedef struct {
    int gate_format, up_format, down_format; /* KTQ_FORMAT_*: all with int8, where they are one, or all with BF16 */
    int64_t experts, parts, hidden, width[KTQ_MOST_PARTS];
    const ktq_expert *expert;
    /* Not with int8 activations. limit > 0: gate = min(gate, limit), up between -limit and limit. alpha > 0: gate is
       limited on both sides, and gate * sigmoid(alpha * gate) * (up + 1) takes the place of silu(gate) * up. */
    float swiglu_limit, swiglu_alpha;
    /* As `expert`: the transposes of all, packed on their own in the same formats, for a backward, whose gradients are
       quantized where activations are. NULL: a backward transposes the numbers of `expert`, and multiplies in BF16. */
    const ktq_expert *transposed;
} ktq_moe;

/* out[t] = the sum over j of weights[t][j] * expert ids[t][j] (hidden[t]). hidden, out: BF16 [tokens, hidden];
   ids, weights: [tokens, topk]. Ids that are negative, not below experts, or marked in skip[experts] (may be NULL) add
   nothing. add: 1 if the sum is added to what out holds (rounded once, in the end), 0 if it takes its place. */
typedef struct {
    int exact; /* 1: round where kt-kernel rounds; 0: round less. AMXINT4 and AMXINT8 only */
    int64_t tokens, topk;
    const uint16_t *hidden;
    const int64_t *ids;
    const float *weights;
    const uint8_t *skip;
    uint16_t *out;
    int add;
} ktq_call;

int ktq_forward(ktq_pool *pool, const ktq_moe *moe, const ktq_call *call);

/* LoRA of a layer's experts (numerics.md, section 5c), in the order gate, up, down; a: [experts][rank][columns], b:
   [experts][rows][rank], BF16 or float32. dropout: the part of the inputs of `a` that is left out; which ones depends
   on the seed. */
typedef struct {
    int float32;
    int64_t rank;
    float scaling, dropout;
    uint64_t seed;
    const void *a[3], *b[3];
} ktq_lora;
enum { KTQ_MOST_RANK = 1024 };

/* What the forward keeps for the backward, BF16, a row for each of tokens * topk; columns: of all parts. low: of gate,
   up and, for each part, down, the products with `a`, 2 * ktq_low_columns(rank) for each row; without LoRA NULL. */
typedef struct {
    uint16_t *gate, *up, *act; /* [rows][columns] */
    uint16_t *down;            /* [parts][rows][hidden] */
    uint16_t *low;
} ktq_kept;
int64_t ktq_low_columns(int64_t rank);

/* The gradients: out: given, BF16 [tokens][hidden]; hidden, BF16, and weights [tokens][topk]; of lora's a and b, as
   these are, times `scale`; those of experts without tokens are not written. */
typedef struct {
    const uint16_t *out;
    uint16_t *hidden;
    float *weights;
    float scale;
    void *a[3], *b[3];
} ktq_gradients;

/* 1 if there are gradients: no weight's format has least values or two terms, the activation neither limit nor alpha.
   */
int ktq_trainable(const ktq_moe *moe);
/* ktq_forward with LoRA (NULL: none), and its gradients. KTQ_EINVAL where there are none. call->add and exact have no
   meaning here. The backward gets the same call, lora and kept; it does not use call->out. */
int ktq_train_forward(ktq_pool *pool, const ktq_moe *moe, const ktq_call *call, const ktq_lora *lora,
                      const ktq_kept *kept);
int ktq_train_backward(ktq_pool *pool, const ktq_moe *moe, const ktq_call *call, const ktq_lora *lora,
                       const ktq_kept *kept, const ktq_gradients *gradients);

/* Ways to turn a tensor in memory into rows of items: from panels (bytes.md, Panels), numbers of one byte or of two;
   bytes of two codes each, as in MXFP4, or with the highest bit of each flipped, as offset binary; scales of two bytes,
   or of one, for each row of a panel, group after group; the latter as E8M0, to BF16. Or plain rows of bytes. */
enum {
    KTQ_PANEL_BYTES,
    KTQ_PANEL_HALVES,
    KTQ_PANEL_NIBBLES,
    KTQ_PANEL_OFFSET_NIBBLES,
    KTQ_PANEL_SCALES,
    KTQ_PANEL_SCALE_BYTES,
    KTQ_PANEL_EXPONENTS,
    KTQ_IN_ROWS
};

/* A rectangle of `rows` x `columns` items, in panels whole ones and whole blocks of 32 columns. from_stride (bytes): to
   the next panel, or row; row_stride: to the next row in `to`. */
typedef struct {
    int order;
    int64_t rows, columns, from_stride, row_stride;
    const void *from;
    void *to;
} ktq_rectangle;

int ktq_copy_rows(ktq_pool *pool, int64_t count, const ktq_rectangle *rectangle);

/* Either of the two in the background, one after the other in the order of submission. A job may be submitted again
   once it was waited for; submit and wait can be given to cudaLaunchHostFunc. moe and call are copied, what they point
   to is not, nor are rectangles.
   In a child made by fork() a job that was pending ends with KTQ_EFORK, and can be submitted again.
   ktq_job_wait returns at once if nothing was submitted; ktq_job_result says how the last run ended. */
typedef struct ktq_job ktq_job;
int ktq_job_new(ktq_pool *pool, const ktq_moe *moe, const ktq_call *call, ktq_job **job);
int ktq_copy_job_new(ktq_pool *pool, int64_t count, const ktq_rectangle *rectangle, ktq_job **job);
void ktq_job_submit(void *job);
void ktq_job_wait(void *job);
int ktq_job_result(const ktq_job *job);
void ktq_job_free(ktq_job *job);

/* NUMA nodes of memory; KTQ_ESYSTEM where the kernel refuses (errno says why). address: the beginning of a page.
   place: later pages go to one of these nodes if it has room, in turns where there are several nodes.
   gather: pages on other nodes move to this node, as far as it has room.
   policy: the calling thread's policy, MPOL_* in *mode and its nodes as bits of nodes[KTQ_NODE_WORDS]. */
#define KTQ_NODE_WORDS 16
int ktq_place_memory(void *address, size_t length, int count, const int *nodes);
int ktq_gather_memory(void *address, size_t length, int node);
int ktq_memory_policy(int *mode, uint64_t *nodes);

/* Reads each line of `bytes` bytes once, in 1, 2 or 4 streams: parts of equal length that are read side by side.
   *sum: the exclusive or of the first 8 bytes of each 64 (fewer where they end, in the order of the machine). */
int ktq_read(int streams, int64_t bytes, const void *from, uint64_t *sum);

const char *ktq_compiler(void); /* that made this: "gcc 12.2.0" */

/* Instruction sets, worst first: 0 "scalar" .. ktq_isa_count() - 1 "amx". */
int ktq_isa_count(void);
const char *ktq_isa_name(int isa);
int ktq_isa_available(int isa); /* supported by this CPU and operating system */
int ktq_isa(void);              /* in use; the best available until ktq_set_isa */
int ktq_set_isa(int isa);       /* -1: the best available. KTQ_EISA if it is not available */

/* The rows of kernels.def: family and instruction set (a number as above, -1 past the end). */
int ktq_kernel_isa(int row);
const char *ktq_kernel_family(int row);
/* The kernels in use, a kt_kernels (kernels.h), for measuring or testing a single kernel. */
const void *ktq_kernels(void);

/* Explain a page of a mapped file that cannot be read (SIGBUS): a sentence on stderr that names the file, then
   _exit(code). `sentence` holds one %s for the name. A fault elsewhere, and a signal that was sent, go to whom they
   went before. Without ktq_guard_sigbus, bytes of a mapping that may_lose become zeros, from the page on that cannot be
   read. ktq_lost: the name of the file if some of these bytes did, else NULL. ktq_any_lost: 1 if any did, ever. */
int ktq_guard_sigbus(const char *sentence, int code);
int ktq_register_mapping(const void *address, size_t length, const char *name, int may_lose);
const char *ktq_lost(const void *address, size_t length);
int ktq_any_lost(void);
int ktq_unregister_mapping(const void *address);

const char *ktq_strerror(int error);

/* cdef end */

#endif
