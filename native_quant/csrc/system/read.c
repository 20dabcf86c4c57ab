/* Reads memory and computes next to nothing: an upper bound of the speed of code that reads its weights once. */
#include <string.h>

#include "ktq.h"

enum {
    LINE = 64,
    STEP = 4 * LINE,
    AHEAD = 2048, /* distance in bytes at which each stream is prefetched */
};

/* The first 8 bytes of a line that has only `size` bytes. */
static inline __attribute__((always_inline)) uint64_t word(const char *at, size_t size) {
    uint64_t bits = 0;
    memcpy(&bits, at, size < sizeof bits ? size : sizeof bits);
    return bits;
}

/* Callers pass a constant for `streams`, so that the inner loops have no branches. One word of each line is enough:
   loads of 16 bytes take 6 % longer. */
static inline __attribute__((always_inline)) uint64_t read_parts(const char *from, size_t part, int streams) {
    uint64_t sum[STEP / LINE] = {0};
    for (size_t at = 0; at < part; at += STEP)
        for (int s = 0; s < streams; s++) {
            const char *stream = from + (size_t)s * part + at;
            for (int i = 0; i < STEP / LINE; i++) {
                __builtin_prefetch(stream + AHEAD + i * LINE);
                sum[i] ^= word(stream + i * LINE, LINE);
            }
        }
    return sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
}

int ktq_read(int streams, int64_t bytes, const void *from, uint64_t *sum) {
    if (bytes < 0 || (!from && bytes) || !sum) return KTQ_EINVAL;
    if (streams != 1 && streams != 2 && streams != 4) return KTQ_EINVAL;
    size_t size = (size_t)bytes, part = size / (size_t)streams / STEP * STEP;
    if (streams == 1) *sum = read_parts(from, part, 1);
    else if (streams == 2) *sum = read_parts(from, part, 2);
    else *sum = read_parts(from, part, 4);
    for (size_t at = part * (size_t)streams; at < size; at += LINE) *sum ^= word((const char *)from + at, size - at);
    return KTQ_OK;
}
