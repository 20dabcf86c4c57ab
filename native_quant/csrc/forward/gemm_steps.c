/* The order in which a 256-bit kernel multiplies: gemm_steps.h. */
#include <string.h>

#include "gemm_steps.h"

/* Number of tokens whose activations fit beside the codes. */
enum { GROUP = (KT_GEMM_SCRATCH - KT_CODES_BYTES) / KT_CHUNK_PITCH };

static void begin_sums(const kt_gemm *job, int32_t offset) {
    for (int64_t t = 0; t < job->m; t++) {
        int32_t sum = 0;
        for (int64_t b = 0; b * KT_K_BLOCK < job->k; b++) sum += job->sums[t * job->sums_pitch + b];
        for (int64_t s = 0; s < job->panels; s++)
            for (int r = 0; r < KT_PANEL_ROWS; r++) job->c[s * job->c_pitch + t * KT_PANEL_ROWS + r] = -offset * sum;
    }
}

void kt_gemm_few(const kt_gemm *job, int bits, kt_few_fn *few) {
    int8_t *a = (int8_t *)job->scratch;
    for (int64_t first = 0; first < job->k; first += KT_K_BLOCK) {
        int64_t columns = job->k - first < KT_K_BLOCK ? job->k - first : KT_K_BLOCK;
        for (int64_t t = 0; t < job->m; t++)
            memcpy(a + t * KT_K_BLOCK, job->a + t * job->k + first, (size_t)columns);
        for (int64_t s = 0; s < job->panels; s += 2) {
            int64_t panels = job->panels - s < 2 ? 1 : 2;
            const uint8_t *tiles[2];
            int32_t *c[2];
            for (int64_t i = 0; i < panels; i++) {
                tiles[i] = kt_panel_tiles(bits, &job->panel[s + i], job->k, first);
                c[i] = job->c + (s + i) * job->c_pitch;
            }
            few(panels, tiles, columns, a, c);
        }
    }
}

/* The tiles of a panel's columns from `first` on, a multiple of the chunk. */
static const uint8_t *chunk_tiles(const kt_gemm *job, int bits, int64_t s, int64_t first) {
    int64_t in_block = first % KT_K_BLOCK;
    return kt_panel_tiles(bits, &job->panel[s], job->k, first - in_block) + in_block * KT_PANEL_ROWS * bits / 8;
}

static void multiply_chunk(const kt_gemm *job, const kt_gemm_steps *steps, int64_t first, int64_t columns,
                           int64_t token, int64_t tokens) {
    uint8_t *codes = job->scratch;
    int8_t *a = (int8_t *)job->scratch + KT_CODES_BYTES;
    for (int64_t t = 0; t < tokens; t++)
        steps->copy(job->a + (token + t) * job->k + first, columns, a + t * KT_CHUNK_PITCH);
    int64_t blocks = (tokens + KT_FEW - 1) / KT_FEW, bytes = columns * KT_PANEL_ROWS * steps->bits / 8;
    for (int64_t s = 0; s < job->panels; s++) {
        const uint8_t *prefetch = s + 1 < job->panels        ? chunk_tiles(job, steps->bits, s + 1, first)
                                  : first + columns < job->k ? chunk_tiles(job, steps->bits, 0, first + columns)
                                  : job->next                ? job->next
                                                             : codes;
        steps->unpack(chunk_tiles(job, steps->bits, s, first), columns, codes);
        for (int64_t b = 0; b < blocks; b++) {
            int64_t from = tokens * b / blocks, to = tokens * (b + 1) / blocks;
            steps->block[to - from - 1](codes, columns, a + from * KT_CHUNK_PITCH,
                                        job->c + s * job->c_pitch + (token + from) * KT_PANEL_ROWS,
                                        prefetch + bytes * b / blocks, bytes / blocks / (columns / 4));
        }
    }
}

static void multiply_many(const kt_gemm *job, const kt_gemm_steps *steps) {
    int64_t groups = (job->m + GROUP - 1) / GROUP;
    for (int64_t first = 0, columns; first < job->k; first += columns) {
        int64_t remaining = job->k - first, remaining_in_block = KT_K_BLOCK - first % KT_K_BLOCK;
        columns = remaining < remaining_in_block ? remaining : remaining_in_block;
        if (columns > steps->chunk) columns = steps->chunk;
        for (int64_t g = 0; g < groups; g++) {
            int64_t from = job->m * g / groups, to = job->m * (g + 1) / groups;
            multiply_chunk(job, steps, first, columns, from, to - from);
        }
    }
}

int kt_gemm_in_steps(const kt_gemm *job, const kt_gemm_steps *steps) {
    begin_sums(job, steps->offset);
    if (job->m <= KT_FEW) kt_gemm_few(job, steps->bits, steps->few[job->m - 1]);
    else multiply_many(job, steps);
    return kt_get_geometry(steps->bits)->unit;
}
