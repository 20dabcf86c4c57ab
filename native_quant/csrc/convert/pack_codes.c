/* The loop over codes that were chosen elsewhere: 16 rows at a time are put in the order of the tiles. */
#include <stddef.h>

#include "kernels.h"

static int is_in_range(int bits, const int8_t *row, int64_t k) {
    for (int64_t c = 0; c < k; c++)
        if (row[c] < -kt_largest_code(bits) || row[c] > kt_largest_code(bits)) return 0;
    return 1;
}

int ktq_pack_codes(int bits, int64_t n, int64_t k, const int8_t *codes, int64_t row_stride, uint8_t *weight,
                   int64_t *bad_row) {
    int error = kt_check_shape(bits, n, k);
    if (!error && (!codes || !weight || !bad_row)) error = KTQ_EINVAL;
    if (error) return error;

    kt_pack_codes_fn *pack = kt_current()->pack_codes;
    *bad_row = -1;
    for (int64_t first = 0; first < n; first += KT_HALF_ROWS) {
        const int8_t *rows = codes + first * row_stride;
        int64_t next = first + KT_HALF_ROWS < n ? KT_HALF_ROWS * row_stride : 0;
        int good = 1;
        for (int64_t c = 0; c < k; c += KT_K_BLOCK) {
            int64_t columns = k - c < KT_K_BLOCK ? k - c : KT_K_BLOCK;
            kt_prefetch prefetch = {(const uint8_t *)rows + next + c, row_stride, next != 0};
            good &= pack(bits, rows + c, row_stride, columns, kt_half_tiles(bits, weight, k, first, c), &prefetch);
        }
        if (good) continue;
        for (*bad_row = first; is_in_range(bits, rows, k); rows += row_stride) ++*bad_row;
        return KTQ_ERANGE;
    }
    return KTQ_OK;
}
