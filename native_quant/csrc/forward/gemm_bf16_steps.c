/* The order in which a vector kernel multiplies BF16: gemm_bf16_steps.h. */
#include "gemm_bf16_steps.h"

#include <string.h>

enum {
    CHUNK_BYTES = KT_CHUNK_COLUMNS * KT_PANEL_ROWS * 2,
    SCALES = KT_CHUNK_COLUMNS / KT_SUM_COLUMNS * KT_PANEL_ROWS,
    FEW_COLUMNS = 128, /* of a chunk of such a panel */
};

/* What lies in the scratch memory: a chunk, its scales, activations. */
typedef struct {
    uint16_t chunk[CHUNK_BYTES / 2];
    float scale[SCALES];
    uint8_t a[KT_GEMM_SCRATCH - CHUNK_BYTES - SCALES * sizeof(float)];
} space;
_Static_assert(sizeof(space) == KT_GEMM_SCRATCH, "the activations have what is left");

static int64_t least(int64_t x, int64_t y) {
    return x < y ? x : y;
}

static const uint8_t *codes_of(const kt_bf16_gemm *job, int64_t s, int64_t first) {
    return job->panel[s].codes + first * KT_PANEL_ROWS * job->bits / 8;
}

static void copy(const kt_bf16_gemm *job, const kt_bf16_steps *steps, int64_t first, int64_t columns, int64_t token,
                 int64_t tokens, uint8_t *out) {
    for (int64_t t = token; t < token + tokens; t++, out += KT_CHUNK_COLUMNS * steps->item_bytes)
        steps->copy(job->a + t * job->a_pitch + first, columns, out);
}

/* Columns first .. of panel s for tokens token .., whose activations are in `with`, in blocks. `bytes` from `ahead` on
   are fetched meanwhile. */
static void multiply(const kt_bf16_gemm *job, const kt_bf16_steps *steps, space *with, int64_t s, int64_t first,
                     int64_t columns, int64_t token, int64_t tokens, const uint8_t *ahead, int64_t bytes) {
    const uint8_t *chunk = codes_of(job, s, first);
    if (job->chunk) {
        job->chunk(job->kernels, &job->panel[s], first, columns, with->chunk, with->scale);
        chunk = (const uint8_t *)with->chunk;
    }
    int64_t blocks = (tokens + steps->tokens - 1) / steps->tokens, step = bytes / blocks / (columns / 2);
    for (int64_t b = 0; b < blocks; b++, ahead += bytes / blocks) {
        int64_t from = tokens * b / blocks, to = tokens * (b + 1) / blocks;
        steps->block(&(kt_bf16_block){.tokens = to - from,
                                      .chunk = chunk,
                                      .columns = columns,
                                      .sum_columns = job->sum_columns,
                                      .scale = with->scale,
                                      .scale_step = job->chunk ? KT_PANEL_ROWS : 0,
                                      .a = with->a + from * KT_CHUNK_COLUMNS * steps->item_bytes,
                                      .c = job->c + s * job->c_pitch + (token + from) * KT_PANEL_ROWS,
                                      .ahead = ahead,
                                      .step = step});
    }
}

static void multiply_few(const kt_bf16_gemm *job, const kt_bf16_steps *steps, space *with) {
    for (int64_t pair = 0; pair < job->panels; pair += 2)
        for (int64_t first = 0, columns; first < job->k; first += columns) {
            columns = least(job->k - first, FEW_COLUMNS);
            copy(job, steps, first, columns, 0, job->m, with->a);
            for (int64_t s = pair; s < least(pair + 2, job->panels); s++) {
                /* The first half is fetched while the chunk is made. */
                int64_t bytes = columns * KT_PANEL_ROWS * job->bits / 8, left = job->chunk ? bytes / 2 : bytes;
                multiply(job, steps, with, s, first, columns, 0, job->m,
                         codes_of(job, s, first) + KT_CHUNK_AHEAD + bytes - left, left);
            }
        }
}

static void multiply_many(const kt_bf16_gemm *job, const kt_bf16_steps *steps, space *with) {
    int64_t group = (int64_t)sizeof with->a / (KT_CHUNK_COLUMNS * steps->item_bytes);
    int64_t groups = (job->m + group - 1) / group;
    for (int64_t first = 0, columns; first < job->k; first += columns) {
        columns = least(job->k - first, KT_CHUNK_COLUMNS);
        for (int64_t g = 0; g < groups; g++) {
            int64_t from = job->m * g / groups, to = job->m * (g + 1) / groups;
            copy(job, steps, first, columns, from, to - from, with->a);
            for (int64_t s = 0; s < job->panels; s++) {
                const uint8_t *ahead = s + 1 < job->panels        ? codes_of(job, s + 1, first)
                                       : first + columns < job->k ? codes_of(job, 0, first + columns)
                                                                  : codes_of(job, s, first);
                multiply(job, steps, with, s, first, columns, from, to - from, ahead,
                         columns * KT_PANEL_ROWS * job->bits / 8);
            }
        }
    }
}

void kt_gemm_bf16_in_steps(const kt_bf16_gemm *job, const kt_bf16_steps *steps) {
    space *with = (space *)job->scratch;
    for (int64_t i = 0; i < KT_PANEL_ROWS; i++) with->scale[i] = 1;
    for (int64_t s = 0; s < job->panels; s++)
        memset(job->c + s * job->c_pitch, 0, (size_t)(job->m * KT_PANEL_ROWS) * sizeof *job->c);
    (job->m <= steps->tokens ? multiply_few : multiply_many)(job, steps, with);
}
