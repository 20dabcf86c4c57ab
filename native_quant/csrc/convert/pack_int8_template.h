/* A half tile of AMXINT8 (pack_template.h). The caller guarantees that no x * reciprocal leaves -127..127, and that
 * subnormal values do not matter in these rows. */
#include "pack_template.h"

TARGET void KERNEL_OF(pack_int8)(const uint8_t *rows, int64_t row_stride, int64_t columns, const float *reciprocal,
                                 uint8_t *tiles, const kt_prefetch *prefetch) {
    kt_pack_tiles(8, kt_int8_codes, rows, row_stride, columns, reciprocal, tiles, prefetch);
}
