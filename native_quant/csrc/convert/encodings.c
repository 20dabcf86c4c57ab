/* Properties of the encodings of a source (ktq.h), and the check of a source. */
#include "kernels.h"

int kt_column_bits(int kind) {
    switch (kind) {
    case KTQ_BF16:
    case KTQ_FP16: return 16;
    case KTQ_F32: return 32;
    case KTQ_FP8_E4M3:
    case KTQ_INT8:
    case KTQ_INT8_SIGNED: return 8;
    case KTQ_INT4:
    case KTQ_INT4_AWQ:
    case KTQ_FP4_E2M1: return 4;
    }
    kt_block block = kt_get_block(kind);
    return block.columns ? (int)(block.bytes * 8 / block.columns) : 0;
}

int kt_is_integer(int kind) {
    return kind == KTQ_INT4 || kind == KTQ_INT8 || kind == KTQ_INT8_SIGNED || kind == KTQ_INT4_AWQ;
}

int kt_is_row_contiguous(const ktq_source *source) {
    if (source->kind == KTQ_INT4_AWQ) return 0;
    if (kt_is_integer(source->kind)) return source->column_stride == 1 || source->column_stride == 4;
    return source->kind == KTQ_FP4_E2M1 || kt_get_block(source->kind).columns ||
           source->column_stride * 8 == kt_column_bits(source->kind);
}

int kt_check_source(const ktq_source *source, int64_t n, int64_t k) {
    int bits = kt_column_bits(source->kind);
    if (!bits || !source->values || n <= 0 || k <= 0 || source->skip < 0) return KTQ_EINVAL;
    int64_t adjacent = kt_is_integer(source->kind) ? 4 : bits / 8;
    if (!kt_is_row_contiguous(source) && source->row_stride != adjacent) return KTQ_EINVAL;
    if (source->kind != KTQ_FP8_E4M3 && source->kind != KTQ_FP4_E2M1 && !kt_is_integer(source->kind)) return KTQ_OK;
    if (!source->scales || source->block_rows <= 0 || source->block_columns <= 0) return KTQ_EINVAL;
    if (source->first_row < 0 || source->first_column < 0) return KTQ_EINVAL;
    if (source->column_groups) return KTQ_OK;
    if ((source->first_column + k - 1) / source->block_columns >= source->scales_per_row) return KTQ_EINVAL;
    return KTQ_OK;
}
