/* FP16 and F32 a vector of float32 at a time, FP8 a vector of bytes, by table (fp8_table.h). A row that holds a NaN or
 * a scale out of the ordinary is left to the scalar kernel; so is the end of a row that fills no vector. */
#include "bf16_template.h"
#include "fp8_table.h"

/* `columns` FP16 or F32 values of one row; whether none was NaN. */
TARGET static inline __attribute__((always_inline)) int decode_wide(int kind, const uint8_t *in, int64_t columns,
                                                                    uint16_t *out) {
    ints largest = setzero_si();
    for (int64_t c = 0; c < columns; c += LANES) {
        floats x = kind == KTQ_FP16 ? load_ph_ps(in + 2 * c) : castsi_ps(loadu_si(in + 4 * c));
        largest = max_epu32(largest, and_si(castps_si(x), set1_epi32(0x7fffffff)));
        store_epi32_epi16(out + c, to_bf16(x));
    }
    return !any_gt_epi32(largest, set1_epi32(0x7f800000));
}

typedef struct {
    ints normal_low, normal_high, subnormal_low, subnormal_high; /* the same 16 bytes in each 128 bits */
} fp8_table;

TARGET static inline fp8_table make_table(float scale) {
    uint16_t entries[32];
    for (int i = 0; i < 32; i += LANES)
        store_epi32_epi16(entries + i, to_bf16(mul_ps(loadu_ps(kt_fp8_entries + i), set1_ps(scale))));
    return (fp8_table){load_repeated_bytes(entries, 0), load_repeated_bytes(entries, 1),
                       load_repeated_bytes(entries + 16, 0), load_repeated_bytes(entries + 16, 1)};
}

/* `columns` codes of one row; whether none was NaN. */
TARGET static int decode_fp8(const uint8_t *in, int64_t columns, const fp8_table *t, uint16_t *out) {
    ints largest = setzero_si();
    for (int64_t c = 0; c < columns; c += VECTOR_BYTES) {
        ints code = before_unpack(loadu_si(in + c));
        ints magnitude = and_si(code, set1_epi8(0x7f));
        largest = max_epu8(largest, magnitude);
        mask subnormal = gt_epi8(set1_epi8(8), magnitude);
        ints low = where_epi8(subnormal, shuffle_epi8(t->subnormal_low, magnitude),
                              shuffle_epi8(t->normal_low, magnitude));
        ints high = where_epi8(subnormal, shuffle_epi8(t->subnormal_high, magnitude),
                               shuffle_epi8(t->normal_high, magnitude));
        high = add_epi8(high, and_si(srli_epi16(code, 4), set1_epi8(7)));
        high = xor_si(high, and_si(code, set1_epi8(0x80)));
        storeu_si(out + c, unpacklo_epi8(low, high));
        storeu_si(out + c + VECTOR_BYTES / 2, unpackhi_epi8(low, high));
    }
    return !any_gt_epu8(largest, set1_epi8(0x7e));
}

TARGET void KERNEL_OF(decode)(int kind, const uint8_t *in, int64_t in_stride, int64_t rows, int64_t columns,
                              float scale, uint16_t *out, int64_t out_pitch) {
    int64_t step = kind == KTQ_FP8_E4M3 ? VECTOR_BYTES : LANES, whole = columns / step * step;
    if (kind == KTQ_FP8_E4M3 && !kt_fp8_table_holds(scale)) whole = 0;
    fp8_table t;
    if (kind == KTQ_FP8_E4M3 && whole) t = make_table(scale);
    for (int64_t r = 0; r < rows; r++, in += in_stride, out += out_pitch) {
        int good = kind == KTQ_FP16 ? decode_wide(KTQ_FP16, in, whole, out)
                   : kind == KTQ_F32 ? decode_wide(KTQ_F32, in, whole, out)
                                     : decode_fp8(in, whole, &t, out);
        int64_t done = good ? whole : 0;
        if (done < columns)
            kt_decode_scalar(kind, in + done * kt_column_bits(kind) / 8, 0, 1, columns - done, scale, out + done, 0);
    }
}
