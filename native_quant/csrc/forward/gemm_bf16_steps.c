/* The order in which a vector kernel multiplies BF16: gemm_bf16_steps.h. */
#include "gemm_bf16_steps.h"

#include <string.h>

enum {
    CHUNK_BYTES = KT_CHUNK_COLUMNS * KT_PANEL_ROWS * 2,
    SCALES = KT_CHUNK_COLUMNS / KT_SUM_COLUMNS * KT_PANEL_ROWS,
    FEW_DECODED = 128, /* columns of a decoded chunk in multiply_few */
};

/* Layout of the scratch memory: a chunk, its scales, activations. */
typedef struct {
    uint16_t chunk[CHUNK_BYTES / 2];
    float scale[SCALES];
    uint8_t a[KT_GEMM_SCRATCH - CHUNK_BYTES - SCALES * sizeof(float)];
} space;
_Static_assert(sizeof(space) == KT_GEMM_SCRATCH, "activations take the remaining space");

/* The scales of panels without scales. */
static const float ones[KT_PANEL_ROWS] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                          1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

static int64_t minimum(int64_t x, int64_t y) {
    return x < y ? x : y;
}

/* Bytes of the codes of `columns` columns of a panel. */
static int64_t code_bytes(const kt_bf16_panel *panel, int64_t columns) {
    return columns * KT_PANEL_ROWS * panel->bits / 8;
}

static const uint8_t *get_codes(const kt_bf16_panel *panel, int64_t first) {
    return panel->codes + code_bytes(panel, first);
}

kt_ahead kt_find_ahead(const kt_bf16_gemm *job, int64_t s, int64_t first, int64_t columns) {
    const kt_bf16_panel *pair = &job->panel[s - s % 2];
    const int64_t half = code_bytes(pair, columns) / 2;
    const uint8_t *next = get_codes(pair, first) + KT_CHUNK_AHEAD;
    if (pair + 1 == job->panel + job->panels) return (kt_ahead){{next, next + half}};
    return (kt_ahead){{next + s % 2 * half, get_codes(pair + 1, first) + KT_CHUNK_AHEAD + s % 2 * half}};
}

static void copy(const kt_bf16_gemm *job, const kt_bf16_steps *steps, int64_t first, int64_t columns, int64_t token,
                 int64_t tokens, uint8_t *out) {
    for (int64_t t = token; t < token + tokens; t++, out += steps->row_bytes)
        steps->copy(job->a + t * job->a_pitch + first, columns, out);
}

/* The function that multiplies codes of a panel as they are read, or NULL. */
static kt_bf16_block_fn *find_few(const kt_bf16_steps *steps, const kt_bf16_panel *panel, int64_t tokens) {
    return tokens <= KT_FEW_TOKENS ? steps->few[panel->coding][tokens - 1] : NULL;
}

/* Reads the scales of a panel's columns, or those of KT_SUM_COLUMNS columns if all columns share them. */
static void read_scales(const kt_bf16_gemm *job, const kt_bf16_panel *panel, int64_t first, float *scratch,
                        kt_bf16_block *work) {
    work->scale = ones;
    work->scale_step = 0;
    if (!panel->scale) return;
    const int are_same = (first & (panel->sum_columns - 1)) + work->columns <= panel->sum_columns;
    panel->scale(job->kernels, panel, first, are_same ? KT_SUM_COLUMNS : work->columns, scratch);
    work->scale = scratch;
    work->scale_step = are_same ? 0 : KT_PANEL_ROWS;
}

void kt_subtract_least(const kt_bf16_gemm *job, int64_t s, int64_t first, int64_t token, int64_t tokens, float *least) {
    const kt_bf16_panel *panel = &job->panel[s];
    const int64_t pitch = job->k / KT_SUM_COLUMNS;
    panel->least(job->kernels, panel, first, KTQ_K_COLUMNS, least);
    job->kernels->subtract_least(tokens, KTQ_K_COLUMNS / KT_SUM_COLUMNS, least,
                                 job->sums + token * pitch + first / KT_SUM_COLUMNS, pitch,
                                 job->c + s * job->c_pitch + token * KT_PANEL_ROWS);
}

/* Multiplies columns of panel s with tokens whose activations are in scratch, block by block. Meanwhile prefetches
   `bytes` bytes. */
static void multiply(const kt_bf16_gemm *job, const kt_bf16_steps *steps, space *scratch, int64_t s, int64_t first,
                     int64_t columns, int64_t token, int64_t tokens, const uint8_t *prefetch, int64_t bytes) {
    const kt_bf16_panel *panel = &job->panel[s];
    kt_chunk_fn *to_chunk = steps->integers ? panel->integers->chunk : panel->chunk;
    const int64_t blocks = (tokens + steps->tokens - 1) / steps->tokens, terms = panel->terms;
    const int64_t at_once = kt_chunk_columns(panel), block_bytes = bytes / (blocks * terms),
                  step = block_bytes / (columns / 2);
    if (panel->least) kt_subtract_least(job, s, first, token, tokens, scratch->scale);
    for (int64_t j = 0, count; j < columns; j += count) {
        count = minimum(columns - j, at_once);
        const uint8_t *chunk = get_codes(panel, first + j);
        if (to_chunk) {
            to_chunk(job->kernels, panel, first + j, count, scratch->chunk);
            chunk = (const uint8_t *)scratch->chunk;
        }
        kt_bf16_block work = {.columns = count, .sum_columns = panel->sum_columns, .step = step};
        read_scales(job, panel, first + j, scratch->scale, &work);
        for (int64_t b = 0; b < blocks * terms; b++, prefetch += block_bytes * count / columns) {
            int64_t from = tokens * (b % blocks) / blocks, to = tokens * (b % blocks + 1) / blocks;
            work.tokens = to - from;
            work.chunk = chunk + b / blocks * count * KT_PANEL_ROWS * 2;
            work.a = scratch->a + from * steps->row_bytes + j * steps->item_bytes;
            work.c = job->c + s * job->c_pitch + (token + from) * KT_PANEL_ROWS;
            work.prefetch = prefetch;
            steps->block(&work);
        }
    }
}

/* The same for codes that are multiplied as they are read, of all tokens. */
static void multiply_codes(const kt_bf16_gemm *job, kt_bf16_block_fn *few, space *scratch, int64_t s, int64_t first,
                           int64_t columns) {
    const kt_bf16_panel *panel = &job->panel[s];
    kt_bf16_block work = {.tokens = job->m,
                          .chunk = get_codes(panel, first),
                          .columns = columns,
                          .a = scratch->a,
                          .c = job->c + s * job->c_pitch,
                          .ahead = kt_find_ahead(job, s, first, columns)};
    read_scales(job, panel, first, scratch->scale, &work);
    few(&work);
}

static void multiply_few(const kt_bf16_gemm *job, const kt_bf16_steps *steps, space *scratch) {
    const kt_bf16_panel *first_panel = job->panel;
    kt_bf16_block_fn *few = find_few(steps, first_panel, job->m);
    const int64_t most = few                  ? KT_IN_ORDER_COLUMNS * 16 / first_panel->bits
                         : first_panel->chunk ? FEW_DECODED
                                              : steps->few_columns;
    for (int64_t pair = 0; pair < job->panels; pair += 2)
        for (int64_t first = 0, columns; first < job->k; first += columns) {
            columns = minimum(job->k - first, most);
            copy(job, steps, first, columns, 0, job->m, scratch->a);
            for (int64_t s = pair; s < minimum(pair + 2, job->panels); s++) {
                const kt_bf16_panel *panel = &job->panel[s];
                if (few && !(panel->is_special && panel->is_special(panel, first, columns))) {
                    multiply_codes(job, few, scratch, s, first, columns);
                    continue;
                }
                /* Making the chunk prefetches the first half. */
                int64_t bytes = code_bytes(panel, columns), late_bytes = panel->chunk ? bytes / 2 : bytes;
                multiply(job, steps, scratch, s, first, columns, 0, job->m,
                         get_codes(panel, first) + KT_CHUNK_AHEAD + bytes - late_bytes, late_bytes);
            }
        }
}

static void multiply_many(const kt_bf16_gemm *job, const kt_bf16_steps *steps, space *scratch) {
    int64_t group = (int64_t)sizeof scratch->a / steps->row_bytes;
    int64_t groups = (job->m + group - 1) / group;
    const int64_t most = job->panel->least ? KTQ_K_COLUMNS : KT_CHUNK_COLUMNS;
    for (int64_t first = 0, columns; first < job->k; first += columns) {
        columns = minimum(job->k - first, most);
        for (int64_t g = 0; g < groups; g++) {
            int64_t from = job->m * g / groups, to = job->m * (g + 1) / groups;
            copy(job, steps, first, columns, from, to - from, scratch->a);
            for (int64_t s = 0; s < job->panels; s++) {
                const kt_bf16_panel *panel = &job->panel[s];
                const uint8_t *prefetch = s + 1 < job->panels        ? get_codes(panel + 1, first)
                                          : first + columns < job->k ? get_codes(job->panel, first + columns)
                                                                     : get_codes(panel, first);
                multiply(job, steps, scratch, s, first, columns, from, to - from, prefetch, code_bytes(panel, columns));
            }
        }
    }
}

void kt_clear_bf16_sums(const kt_bf16_gemm *job, int64_t s) {
    memset(job->c + s * job->c_pitch, 0, (size_t)(job->m * KT_PANEL_ROWS) * sizeof *job->c);
}

void kt_gemm_bf16_in_steps(const kt_bf16_gemm *job, const kt_bf16_steps *steps) {
    space *scratch = (space *)job->scratch;
    for (int64_t s = 0; s < job->panels; s++) kt_clear_bf16_sums(job, s);
    (job->m <= steps->tokens ? multiply_few : multiply_many)(job, steps, scratch);
}
