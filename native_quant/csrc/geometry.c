/* Queries of the geometry table (geometry.h) by Python and the entry points. */
#include "geometry.h"
#include "ktq.h"

int64_t ktq_block_rows(int bits) {
    return bits > 0 && bits <= KT_MAX_BITS ? kt_geometries[bits].block_rows : 0;
}

int64_t ktq_tile_columns(int bits) {
    return bits > 0 && bits <= KT_MAX_BITS ? kt_geometries[bits].tile_columns : 0;
}

int kt_check_shape(int bits, int64_t n, int64_t k) {
    if (!ktq_block_rows(bits) || n <= 0 || k <= 0) return KTQ_EINVAL;
    return n % ktq_block_rows(bits) || k % ktq_tile_columns(bits) ? KTQ_ESHAPE : KTQ_OK;
}
