/* Products of integers with few tokens (gemm_int16.h): vectors of the codes of LANES rows, decoded in registers. A file
 * that includes this after gemm_int16_template.h must define
 *
 *     FEW_BLOCK, FEW_BLOCKS(X)    the most tokens of a block with activations of 14 bits; X(1) .. X(FEW_BLOCK)
 *     FEW_AHEAD(bits)             bytes between a code that is multiplied and one that is prefetched with a small L1
 *     FEW_SCALES_AHEAD            blocks of KTQ_K_COLUMNS columns between scales that are read and those prefetched
 *                                 into L2; into L1, it is two (Zen 5: 0.84 to 0.99 of the time of one, into L2)
 *     FEW_FETCHED                 fewest products of a code of 4 bits for which codes are prefetched with a small L1
 *     FEW_UNITS                   columns of a unit with codes of up to 5, of 6 and of 8 bits, at most KT_CHUNK_COLUMNS
 *     FEW(bits)                   the most tokens that are few, for codes of so many bits
 *     add_quads(part, w, a)       adds to `part` the products of unsigned with signed bytes, four for each int32
 *     add_widened(sum, part, h)   adds such a part to int32, times 128 if h is 1
 *     PART_LINES(bits)            lines of two quads whose products a part may hold
 *     WIDE(tokens)                whether activations of 14 bits are int16 with so many tokens, instead of two bytes:
 *                                 the same for all tokens of a job and for those of each of its blocks */
#include "upper_bits.h"

#define INLINE __attribute__((always_inline)) TARGET static inline

/* Codes of 4 bits: unsigned, signed, or indices of values. */
enum { UNSIGNED, SIGNED, VALUES };

/* Two vectors at a time: the halves of the rows, or the two parts of one half after the other. */
enum { TOGETHER = 2 };

/* Codes of line v as unsigned bytes, four columns of each row: of the low or the high nibbles. */
INLINE ints get_quads(int bits, int kind, ints values, int high, const uint8_t *half, int v) {
    ints line = loadu_si(half + v * 64);
    if (kind == SIGNED) line = xor_si(line, set1_epi8(0x88));
    ints quads = and_si(high ? srli_epi16(line, 4) : line, set1_epi8(15));
    if (kind == VALUES) return shuffle_epi8(values, quads);
    if (bits == 4) return quads;
    ints upper = upper_bits(bits, half + 256, v);
    if (high) upper = srli_epi16(upper, bits - 4);
    return or_si(quads, and_si(upper, set1_epi8(bits == 6 ? 48 : 16)));
}

INLINE ints broadcast(const uint8_t *four) {
    int32_t word;
    memcpy(&word, four, sizeof word);
    return set1_epi32(word);
}

/* Adds to `sum`, or stores in it if `part` is 0, the sums of a part of the columns, with 6 bits times their factors. */
INLINE void add_part(int bits, int tokens, int part, const int8_t *factors, ints (*products)[TOGETHER],
                     ints (*sum)[TOGETHER]) {
#pragma GCC unroll 12
    for (int t = 0; t < tokens; t++)
#pragma GCC unroll 2
        for (int x = 0; x < TOGETHER; x++) {
            ints scaled = products[t][x];
            if (bits == 6) scaled = mullo_epi32(scaled, load_epi8_epi32(factors + part * KT_PANEL_ROWS + x * LANES));
            sum[t][x] = part ? add_epi32(sum[t][x], scaled) : scaled;
        }
}

/* Sums of the products of KT_SUM_COLUMNS columns of TOGETHER vectors of codes of 4 to 6 bits with activations of
   `planes` bytes. factors: signed bytes for each 16 columns and row, with 6 bits. */
INLINE void multiply_quads(int planes, int bits, int kind, ints values, int tokens, const uint8_t *const *half,
                           const int8_t *factors, const kt_int16_columns *a, int64_t pitch,
                           ints (*sum)[TOGETHER]) {
    const int lines = bits == 6 ? 2 : 4, most = PART_LINES(kind == VALUES ? 5 : bits); /* values: at most 31 */
    ints part[BLOCK][TOGETHER][2], group[BLOCK][TOGETHER];
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
#pragma GCC unroll 2
        for (int high = 0; high < 2; high++) {
            ints quads[TOGETHER];
#pragma GCC unroll 2
            for (int x = 0; x < TOGETHER; x++) quads[x] = get_quads(bits, kind, values, high, half[x], v);
#pragma GCC unroll 12
            for (int t = 0; t < tokens; t++)
#pragma GCC unroll 2
                for (int plane = 0; plane < planes; plane++) {
                    const int step = most << plane < lines ? most << plane : lines; /* l is at most half of h */
                    const ints four = broadcast(a[t * pitch].a + ((v * 2 + high) * planes + plane) * 4);
#pragma GCC unroll 2
                    for (int x = 0; x < TOGETHER; x++) {
                        ints before = v % step || high ? part[t][x][plane] : setzero_si();
                        part[t][x][plane] = add_quads(before, quads[x], four);
                        if ((v + 1) % step || !high) continue;
                        const int first = v / step * step % lines == 0 && plane == 0;
                        before = first ? set1_epi32(a[t * pitch].start[v / lines]) : group[t][x];
                        group[t][x] = add_widened(before, part[t][x][plane], plane + 1 < planes);
                    }
                }
        }
        if ((v + 1) % lines == 0) add_part(bits, tokens, v / lines, factors, group, sum);
    }
}

/* Codes of columns 2 * pair and 2 * pair + 1 as int16. */
INLINE ints get_pairs(int bits, int kind, ints values, const uint8_t *half, int pair) {
    if (bits == 8) return load_epi8_epi16(half + pair * 2 * KT_HALF_ROWS);
    const ints quads = get_quads(bits, kind, values, pair % 2, half, pair / 4);
    return pair & 2 ? srli_epi16(quads, 8) : and_si(quads, set1_epi16(255));
}

/* The same with activations of int16. */
INLINE void multiply_pairs(int bits, int kind, ints values, int tokens, const uint8_t *const *half,
                           const int8_t *factors, const kt_int16_columns *a, int64_t pitch, ints (*sum)[TOGETHER]) {
    const int pairs = bits == 6 ? KT_SUM_COLUMNS / 4 : KT_SUM_COLUMNS / 2;
    ints group[BLOCK][TOGETHER];
#pragma GCC unroll 16
    for (int i = 0; i < KT_SUM_COLUMNS / 2; i++) {
        const int pair = i - i % 4 + i % 2 * 2 + i / 2 % 2; /* those of the same quads one after the other */
        ints codes[TOGETHER];
#pragma GCC unroll 2
        for (int x = 0; x < TOGETHER; x++) codes[x] = get_pairs(bits, kind, values, half[x], pair);
#pragma GCC unroll 12
        for (int t = 0; t < tokens; t++) {
            const ints two = broadcast(a[t * pitch].a + pair * 4);
#pragma GCC unroll 2
            for (int x = 0; x < TOGETHER; x++) {
                ints before = i % pairs ? group[t][x] : set1_epi32(a[t * pitch].start[i / pairs]);
                group[t][x] = add_products(before, codes[x], two);
            }
        }
        if ((i + 1) % pairs == 0) add_part(bits, tokens, i / pairs, factors, group, sum);
    }
}

/* Whether codes are prefetched with a small L1. Zen 4: with few products of codes of 4 bits, the processor's own
   prefetching is faster (a layer with one token takes 0.8 to 1.0 of the time), but with wider codes it takes 1.3 to 2
   times as long. To look up values takes as long as more products. */
INLINE int fetches(int planes, int bits, int kind, int tokens) {
    return bits > 4 || planes * tokens * (kind == VALUES ? 2 : 1) >= FEW_FETCHED;
}

/* Whether codes have the scales of Q4_K, Q5_K or Q6_K, which are decoded in registers. */
INLINE int has_k_scales(int bits, int kind) {
    return bits == 5 || bits == 6 || (bits == 4 && kind == UNSIGNED);
}

/* The scales of LANES rows of Q4_K and Q5_K, times bytes. */
INLINE floats times_bytes(floats scale, const uint8_t *bytes) {
    return mul_ps(scale, cvtepi32_ps(load_epu8_epi32(bytes)));
}

/* Subtracts the least values of KTQ_K_COLUMNS columns, whose scales are at `scales`, from the sums c of LANES rows. */
INLINE void subtract_least(int tokens, const uint8_t *scales, int row, const kt_int16_columns *a, int64_t pitch,
                           float *c) {
    const floats scale = load_ph_ps(scales + 2 * (KT_PANEL_ROWS + row));
    floats least[KT_K_GROUPS];
    scales += (4 + KT_K_GROUPS) * KT_PANEL_ROWS + row;
#pragma GCC unroll 4
    for (int g = 0; g < KT_K_GROUPS; g++) least[g] = times_bytes(scale, scales + g * KT_PANEL_ROWS);
    for (int t = 0; t < tokens; t++, a += pitch, c += KT_PANEL_ROWS) {
        floats total = load_ps(c);
#pragma GCC unroll 4
        for (int g = 0; g < KT_K_GROUPS; g++) total = fnmadd_ps(least[g], set1_ps(a[g].sum), total);
        store_ps(c, total);
    }
}

/* Sums of the products of KT_SUM_COLUMNS columns of TOGETHER vectors of rows, from column j of the work on. factors: of
   these columns and rows. */
INLINE void multiply_codes(int planes, int bits, int kind, ints values, int tokens, kt_reading reads,
                           const kt_int16_block *work, int64_t j, int row, const int8_t *factors,
                           ints (*sum)[TOGETHER]) {
    const int64_t half_bytes = 64 * bits, line_bytes = bits == 8 ? 32 : 64; /* a line: of the rows of a half */
    const uint8_t *codes = work->codes + j * (KT_PANEL_ROWS * bits / 8) + row / KT_HALF_ROWS * half_bytes;
    const uint8_t *half[TOGETHER];
    const kt_int16_columns *a = work->a + j / KT_SUM_COLUMNS;
    if (bits < 8 ? reads.in_turn : reads.long_units)
        kt_fetch_in_turn(reads.far && bits < 8 && planes * tokens < 4, work->ahead, codes - work->codes,
                         128 * bits / PASSES);
    else
        for (int i = 0; fetches(planes, bits, kind, tokens) && i < 2 * bits / PASSES; i++)
            fetch_to_l2(codes + FEW_AHEAD(bits) + i * 64);
    for (int x = 0; x < TOGETHER; x++)
        half[x] = codes + (row + x * LANES) % KT_HALF_ROWS * line_bytes / KT_HALF_ROWS +
                  (PASSES == 1 ? x * half_bytes : 0);
    if (bits == 8 || (planes == 2 && WIDE(tokens)))
        multiply_pairs(bits, kind, values, tokens, half, factors, a, work->pitch, sum);
    else multiply_quads(planes, bits, kind, values, tokens, half, factors, a, work->pitch, sum);
}

/* Adds these sums, times scales and units, to work->c. */
INLINE void add_scaled(int tokens, const kt_int16_block *work, int64_t j, int row, const floats *scale,
                       ints (*sum)[TOGETHER]) {
    const kt_int16_columns *a = work->a + j / KT_SUM_COLUMNS;
#pragma GCC unroll 12
    for (int t = 0; t < tokens; t++)
#pragma GCC unroll 2
        for (int x = 0; x < TOGETHER; x++) {
            float *c = work->c + t * KT_PANEL_ROWS + row + x * LANES;
            floats product = mul_ps(cvtepi32_ps(sum[t][x]), set1_ps(a[t * work->pitch].unit));
            store_ps(c, fmadd_ps(scale[x], product, load_ps(c)));
        }
}

/* Multiplies KTQ_K_COLUMNS columns of Q4_K, Q5_K or Q6_K, from column `first` of the work on. */
INLINE void multiply_k_columns(int planes, int bits, int kind, int tokens, kt_reading reads,
                               const kt_int16_block *work, int64_t first) {
    const int block_bytes = (bits == 6 ? KTQ_Q6_K_SCALE_BYTES : KTQ_K_SCALE_BYTES) * KT_PANEL_ROWS;
    const uint8_t *scales = work->scales + first / KTQ_K_COLUMNS * block_bytes;
    floats scale[KT_PANEL_ROWS / LANES];
    for (int i = 0; reads.scales_in_l1 && i < block_bytes; i += 64) fetch(scales + 2 * block_bytes + i);
    for (int i = 0; !reads.scales_in_l1 && i < block_bytes; i += 64)
        fetch_to_l2(scales + FEW_SCALES_AHEAD * block_bytes + i);
#pragma GCC unroll 4
    for (int row = 0; row < KT_PANEL_ROWS; row += LANES) {
        scale[row / LANES] = load_ph_ps(scales + 2 * row);
        if (bits < 6)
            subtract_least(tokens, scales, row, work->a + first / KT_SUM_COLUMNS, work->pitch, work->c + row);
    }
    for (int g = 0; g < KT_K_GROUPS; g++)
        for (int row = 0; row < KT_PANEL_ROWS; row += TOGETHER * LANES) {
            const int64_t j = first + g * KT_SUM_COLUMNS;
            const uint8_t *bytes = scales + (4 + g) * KT_PANEL_ROWS + row;
            const int8_t *factors = (const int8_t *)scales + (2 + 2 * g) * KT_PANEL_ROWS + row; /* of Q6_K */
            floats *of_rows = scale + row / LANES, product[TOGETHER];
            ints sum[BLOCK][TOGETHER];
            multiply_codes(planes, bits, kind, setzero_si(), tokens, reads, work, j, row, factors, sum);
            if (bits < 6) {
#pragma GCC unroll 2
                for (int x = 0; x < TOGETHER; x++) product[x] = times_bytes(of_rows[x], bytes + x * LANES);
                of_rows = product;
            }
            add_scaled(tokens, work, j, row, of_rows, sum);
        }
}

INLINE void few_block(int planes, int bits, int kind, int tokens, const kt_int16_block *work) {
    const ints values = kind == VALUES ? load_repeated(work->values) : setzero_si();
    const kt_reading reads = kt_reads; /* not read again after each store */
    if (has_k_scales(bits, kind))
        for (int64_t j = 0; j < work->columns; j += KTQ_K_COLUMNS)
            multiply_k_columns(planes, bits, kind, tokens, reads, work, j);
    else
        for (int64_t j = 0; j < work->columns; j += KT_SUM_COLUMNS)
            for (int row = 0; row < KT_PANEL_ROWS; row += TOGETHER * LANES) {
                const float *scale = work->scale + j + row; /* as many scales as columns: 32 for 32 */
                ints sum[BLOCK][TOGETHER];
                multiply_codes(planes, bits, kind, values, tokens, reads, work, j, row, NULL, sum);
                add_scaled(tokens, work, j, row, (const floats[TOGETHER]){load_ps(scale), load_ps(scale + LANES)}, sum);
            }
}

#define DEFINE_BLOCKS(NAME)                                                                                            \
    FEW_BLOCKS(DEFINE_##NAME)                                                                                          \
    static kt_int16_block_fn *const NAME[FEW_BLOCK] = {FEW_BLOCKS(ADDRESS_##NAME)};
#define DEFINE_LARGER_BLOCKS(NAME)                                                                                     \
    BLOCKS(DEFINE_##NAME)                                                                                              \
    static kt_int16_block_fn *const NAME[BLOCK] = {BLOCKS(ADDRESS_##NAME)};
#define DEFINE_BLOCK(NAME, N, PLANES, BITS, KIND)                                                                      \
    TARGET static void NAME##_##N(const kt_int16_block *work) {                                                        \
        few_block(PLANES, BITS, KIND, N, work);                                                                        \
    }
#define DEFINE_signed_4(N) DEFINE_BLOCK(signed_4, N, 2, 4, SIGNED)
#define DEFINE_unsigned_4(N) DEFINE_BLOCK(unsigned_4, N, 2, 4, UNSIGNED)
#define DEFINE_values_4(N) DEFINE_BLOCK(values_4, N, 2, 4, VALUES)
#define DEFINE_bits_5(N) DEFINE_BLOCK(bits_5, N, 2, 5, UNSIGNED)
#define DEFINE_bits_6(N) DEFINE_BLOCK(bits_6, N, 2, 6, UNSIGNED)
#define DEFINE_bits_8(N) DEFINE_BLOCK(bits_8, N, 2, 8, UNSIGNED)
#define DEFINE_int8_signed_4(N) DEFINE_BLOCK(int8_signed_4, N, 1, 4, SIGNED)
#define DEFINE_int8_unsigned_4(N) DEFINE_BLOCK(int8_unsigned_4, N, 1, 4, UNSIGNED)
#define DEFINE_int8_values_4(N) DEFINE_BLOCK(int8_values_4, N, 1, 4, VALUES)
#define DEFINE_int8_bits_5(N) DEFINE_BLOCK(int8_bits_5, N, 1, 5, UNSIGNED)
#define DEFINE_int8_bits_6(N) DEFINE_BLOCK(int8_bits_6, N, 1, 6, UNSIGNED)
#define ADDRESS_signed_4(N) signed_4_##N,
#define ADDRESS_unsigned_4(N) unsigned_4_##N,
#define ADDRESS_values_4(N) values_4_##N,
#define ADDRESS_bits_5(N) bits_5_##N,
#define ADDRESS_bits_6(N) bits_6_##N,
#define ADDRESS_bits_8(N) bits_8_##N,
#define ADDRESS_int8_signed_4(N) int8_signed_4_##N,
#define ADDRESS_int8_unsigned_4(N) int8_unsigned_4_##N,
#define ADDRESS_int8_values_4(N) int8_values_4_##N,
#define ADDRESS_int8_bits_5(N) int8_bits_5_##N,
#define ADDRESS_int8_bits_6(N) int8_bits_6_##N,
DEFINE_BLOCKS(signed_4)
DEFINE_BLOCKS(unsigned_4)
DEFINE_BLOCKS(values_4)
DEFINE_BLOCKS(bits_5)
DEFINE_BLOCKS(bits_6)
DEFINE_BLOCKS(bits_8)
DEFINE_LARGER_BLOCKS(int8_signed_4)
DEFINE_LARGER_BLOCKS(int8_unsigned_4)
DEFINE_LARGER_BLOCKS(int8_values_4)
DEFINE_LARGER_BLOCKS(int8_bits_5)
DEFINE_LARGER_BLOCKS(int8_bits_6)

/* The bytes of kt_int16_columns. */
INLINE ints split(ints x) {
    static const uint8_t order[16] = {0, 8, 2, 10, 1, 9, 3, 11, 4, 12, 6, 14, 5, 13, 7, 15};
    ints high = srai_epi16(add_epi16(x, set1_epi16(63)), 7), low = sub_epi16(x, slli_epi16(high, 7));
    return shuffle_epi8(or_si(and_si(high, set1_epi16(0xff)), slli_epi16(low, 8)), load_repeated(order));
}

/* Adds up AT_ONCE integers from column i on, by 16 columns, if the codes have an offset. */
INLINE void add_up(const kt_bf16_panel *panel, int i, ints x, int32_t *sum) {
    static const int16_t ones[48] = {[16] = 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}; /* 16 after 16 zeros */
    for (int h = 0; panel->integers->offset && h < AT_ONCE; h += 16)
        sum[(i + h) / 16] = reduce_add_epi32(madd_epi16(x, loadu_si(ones + 16 - h)));
}

/* -offset times the sums of 16 columns each. */
INLINE void begin_sums(const kt_bf16_panel *panel, const int32_t *sum, int32_t *start) {
    start[0] = -panel->integers->offset * (panel->integers->has_factors ? sum[0] : sum[0] + sum[1]);
    start[1] = -panel->integers->offset * sum[1];
}

/* wide: activations become int16 for codes of any bits. */
INLINE void convert_columns(int wide, const kt_bf16_panel *panel, const uint16_t *a, int64_t columns,
                            kt_int16_columns *out) {
    for (int64_t j = 0; j < columns; j += KT_SUM_COLUMNS, a += KT_SUM_COLUMNS, out++) {
        out->unit = find_unit(a);
        const floats reciprocal = set1_ps(kt_int16_reciprocal(out->unit));
        int32_t sum[2] = {0, 0};
        for (int i = 0; i < KT_SUM_COLUMNS; i += AT_ONCE) {
            const ints x = to_int16(a + i, reciprocal);
            storeu_si(out->a + 2 * i, wide || panel->bits == 8 ? x : split(x));
            add_up(panel, i, x, sum);
        }
        begin_sums(panel, sum, out->start);
    }
}

TARGET static void convert(const kt_bf16_panel *panel, const uint16_t *a, int64_t columns, kt_int16_columns *out) {
    convert_columns(0, panel, a, columns, out);
}

TARGET static void convert_wide(const kt_bf16_panel *panel, const uint16_t *a, int64_t columns, kt_int16_columns *out) {
    convert_columns(1, panel, a, columns, out);
}

/* The same with activations of 8 bits. */
TARGET static void convert_int8(const kt_bf16_panel *panel, const uint16_t *a, int64_t columns, kt_int16_columns *out) {
    static const uint8_t order[16] = {0, 8, 2, 10, 4, 12, 6, 14, 0, 8, 2, 10, 4, 12, 6, 14};
    for (int64_t j = 0; j < columns; j += KT_SUM_COLUMNS, a += KT_SUM_COLUMNS, out++) {
        out->unit = kt_int8_unit(find_most(a));
        const floats reciprocal = set1_ps(kt_int8_reciprocal(out->unit));
        int32_t sum[2] = {0, 0};
        for (int i = 0; i < KT_SUM_COLUMNS; i += AT_ONCE) {
            const ints x = to_int16(a + i, reciprocal);
            uint8_t twice[VECTOR_BYTES];
            storeu_si(twice, shuffle_epi8(x, load_repeated(order)));
            for (int c = 0; c < AT_ONCE; c += 8) memcpy(out->a + i + c, twice + 2 * c, 8);
            add_up(panel, i, x, sum);
        }
        begin_sums(panel, sum, out->start);
    }
}

static const kt_int16_few few = {
    FEW_BLOCK, FEW_UNITS, convert, signed_4, unsigned_4, values_4, bits_5, bits_6, bits_8,
};
static const kt_int16_few wide = {
    FEW_BLOCK, FEW_UNITS, convert_wide, signed_4, unsigned_4, values_4, bits_5, bits_6, bits_8,
};
static const kt_int16_few int8 = {
    BLOCK, FEW_UNITS, convert_int8, int8_signed_4, int8_unsigned_4, int8_values_4, int8_bits_5, int8_bits_6, NULL,
};

void KERNEL_OF(gemm_int16)(const kt_bf16_gemm *job) {
    if (kt_has_int8(job)) kt_multiply_few_integers(job, &int8);
    else if (job->m > FEW(job->panel->bits)) kt_gemm_bf16_in_steps(job, &steps);
    else kt_multiply_few_integers(job, WIDE(job->m) ? &wide : &few);
}
