/* Shared by the packers of panels of 32 rows (bytes.md, Panels). */
#ifndef KT_PANELS_H
#define KT_PANELS_H

#include <stdint.h>

#include "kernels.h"

enum { KT_BLOCK_PAIRS = 16 }; /* of columns of a block, which is 32 rows by 32 columns */

/* KTQ_OK if n and k are multiples of `multiple`, else KTQ_ESHAPE. */
int kt_check_panels(int64_t multiple, int64_t n, int64_t k);

/* 32 rows of k items (of 1 or 2 bytes) in an order, KTQ_PANELS or KTQ_ROWS. For panels, k is a multiple of 32. rows,
   row_stride (bytes): any alignment. */
void kt_put_rows(const kt_kernels *kernels, int order, int item_bytes, const uint8_t *rows, int64_t row_stride,
                 int64_t k, uint8_t *out);

/* kt_amax_fn for any k. */
uint16_t kt_row_amax(const kt_kernels *kernels, const uint8_t *row, int64_t k);

/* 32 rows of k items (of 1 or 2 bytes) to a panel: blocks of 32 columns, halves of 16 rows, pairs of columns, rows.
   k: a multiple of 32; rows, row_stride (bytes): any alignment. */
void kt_reorder_panel(const kt_kernels *kernels, int item_bytes, const uint8_t *rows, int64_t row_stride, int64_t k,
                  uint8_t *panel);

/* Codes of 4 bits of a panel, blocks of 32 columns, to 32 rows, the even column in the lower half of a byte; flip: bits
   of 8 codes that become their opposites. */
void kt_unpack_nibbles(const uint8_t *panel, int64_t blocks, uint32_t flip, uint8_t *rows, int64_t row_stride);

/* keep_mxfp4.c: whether a source has codes of E2M1 with a scale for each 32 columns. Then kt_keep_mxfp4 puts codes and
   exponents into panels; *bad_row, if it is -1, becomes the first row that holds an infinity or a NaN. It returns 0,
   with some of it written, if a scale is no power of two, else 1. */
int kt_has_mxfp4(const ktq_source *source);
int kt_keep_mxfp4(const kt_kernels *kernels, const ktq_source *source, int64_t n, int64_t k, uint8_t *codes,
                  uint8_t *exponents, int64_t *bad_row);

#endif
