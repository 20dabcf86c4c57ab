/* Products of integers with few tokens: gemm_int16.h. Two panels are read in turn, a unit of columns at a time, which
 * stays in L1 while one block of tokens after the other is multiplied. Activations are converted once for all
 * panels, as many columns at a time as fit into the scratch memory. */
#include "gemm_int16.h"

enum {
    SCALES = KT_CHUNK_SUMS * KT_PANEL_ROWS,
    FEW_TOKENS = 64,                        /* tokens whose activations fit into the scratch memory */
    CAPACITY = (KT_GEMM_SCRATCH - SCALES * (int)sizeof(float)) / (int)sizeof(kt_int16_columns),
};

typedef struct {
    float scale[SCALES];
    kt_int16_columns a[CAPACITY];
} space;
_Static_assert(sizeof(space) <= KT_GEMM_SCRATCH, "activations take the remaining space");
_Static_assert(CAPACITY >= FEW_TOKENS * KT_CHUNK_SUMS, "at least a chunk of columns at a time");

static int64_t minimum(int64_t x, int64_t y) {
    return x < y ? x : y;
}

/* Columns of a unit: 1 to 4 KiB of codes. Zen 4 reads 6 KiB at a time more slowly, and 4 KiB of codes of 8 bits. With
   one token, 4 KiB of codes of 4 bits are slower. */
static int64_t find_unit_columns(const kt_bf16_panel *panel, const kt_int16_few *few, int64_t tokens) {
    static const int64_t of_long_units[] = {256, 128, 64};
    const int is_long = kt_reads.long_units && (tokens > 1 || panel->bits == 8);
    return (is_long ? of_long_units : few->unit_columns)[panel->bits < 6 ? 0 : panel->bits == 6 ? 1 : 2];
}

/* Whether blocks read the scales: those of Q4_K, Q5_K and Q6_K. */
static int blocks_read_scales(const kt_bf16_panel *panel) {
    return panel->least || panel->integers->has_factors;
}

/* The scales of the columns from `first` on. */
static const uint8_t *get_scales(const kt_bf16_panel *panel, int64_t first) {
    return panel->scales + first / KT_SUM_COLUMNS * panel->scale_bytes;
}

/* Prefetches the scales of columns first .. of panel s, if there is one, with an L1 of 48 KiB or more (Emerald Rapids:
   0.91 to 0.94 of the time with one token of RAWINT4 or Q4_0). Inline, because GCC 12 removes calls of a function that
   only prefetches. */
__attribute__((always_inline)) static inline void fetch_scales(const kt_bf16_gemm *job, int64_t s, int64_t first,
                                                               int64_t columns) {
    if (s >= job->panels || !kt_reads.in_turn) return;
    const kt_bf16_panel *panel = &job->panel[s];
    const uint8_t *scales = get_scales(panel, first);
    const int64_t bytes = columns / KT_SUM_COLUMNS * panel->scale_bytes;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(scales + i, 0, 2);
}

static kt_int16_block_fn *const *choose_blocks(const kt_bf16_panel *panel, const kt_int16_few *few) {
    switch (panel->bits) {
    case 4:
        return panel->integers->values   ? few->values_4
               : panel->integers->offset ? few->signed_4
                                         : few->unsigned_4;
    case 5: return few->bits_5;
    case 6: return few->bits_6;
    default: return few->bits_8;
    }
}

/* Multiplies work->columns columns of panel s, from `first` on, with the activations at work->a. */
static void multiply_unit(const kt_bf16_gemm *job, const kt_int16_few *few, space *scratch, int64_t s, int64_t first,
                          kt_int16_block work) {
    const kt_bf16_panel *panel = &job->panel[s];
    const int64_t blocks = (job->m + few->tokens - 1) / few->tokens;
    const kt_int16_columns *a = work.a;
    if (!blocks_read_scales(panel)) {
        fetch_scales(job, s + 2, first, work.columns);
        panel->scale(job->kernels, panel, first, work.columns, scratch->scale);
    }
    work.codes = panel->codes + first * KT_PANEL_ROWS * panel->bits / 8;
    work.scales = get_scales(panel, first);
    work.values = panel->integers->values;
    work.scale = scratch->scale;
    work.ahead = kt_find_ahead(job, s, first, work.columns);
    for (int64_t b = 0; b < blocks; b++) {
        int64_t from = job->m * b / blocks, to = job->m * (b + 1) / blocks;
        work.tokens = to - from;
        work.a = a + from * work.pitch;
        work.c = job->c + s * job->c_pitch + from * KT_PANEL_ROWS;
        choose_blocks(panel, few)[work.tokens - 1](&work);
    }
}

/* Converts the activations of some columns of all tokens. */
static void convert(const kt_bf16_gemm *job, const kt_int16_few *few, int64_t first, int64_t columns,
                    kt_int16_columns *out) {
    for (int64_t t = 0; t < job->m; t++, out += columns / KT_SUM_COLUMNS) {
        few->convert(job->panel, job->a + t * job->a_pitch + first, columns, out);
        for (int64_t i = 0; job->panel->least && i < columns / KT_SUM_COLUMNS; i++)
            out[i].sum = job->sums[(t * job->k + first) / KT_SUM_COLUMNS + i];
    }
}

static void multiply_columns(const kt_bf16_gemm *job, const kt_int16_few *few, space *scratch, int64_t first,
                             int64_t columns) {
    kt_int16_block work = {.pitch = columns / KT_SUM_COLUMNS};
    const int64_t unit = find_unit_columns(job->panel, few, job->m);
    for (int64_t s = 0; !blocks_read_scales(job->panel) && s < 2; s++) fetch_scales(job, s, first, columns);
    convert(job, few, first, columns, scratch->a);
    for (int64_t pair = 0; pair < job->panels; pair += 2) {
        const int64_t end = minimum(pair + 2, job->panels);
        for (int64_t s = pair; !first && s < end; s++) kt_clear_bf16_sums(job, s);
        for (int64_t j = 0; j < columns; j += unit)
            for (int64_t s = pair; s < end; s++) {
                work.columns = minimum(columns - j, unit);
                work.a = scratch->a + j / KT_SUM_COLUMNS;
                multiply_unit(job, few, scratch, s, first + j, work);
            }
    }
}

/* Runs a job with at most FEW_TOKENS tokens. */
static void multiply_tokens(const kt_bf16_gemm *job, const kt_int16_few *few) {
    const int64_t at_once = CAPACITY / job->m / KT_CHUNK_SUMS * KT_CHUNK_COLUMNS;
    for (int64_t first = 0; first < job->k; first += at_once)
        multiply_columns(job, few, (space *)job->scratch, first, minimum(job->k - first, at_once));
}

void kt_multiply_few_integers(const kt_bf16_gemm *job, const kt_int16_few *few) {
    for (int64_t first = 0; first < job->m; first += FEW_TOKENS) {
        kt_bf16_gemm part = *job;
        part.m = minimum(job->m - first, FEW_TOKENS);
        part.a += first * job->a_pitch;
        part.c += first * KT_PANEL_ROWS;
        if (part.sums) part.sums += first * job->k / KT_SUM_COLUMNS;
        multiply_tokens(&part, few);
    }
}
