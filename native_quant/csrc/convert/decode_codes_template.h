/* 4 bits: the 16 values of a group are made once, as BF16, and its codes are looked up in them, 32 at a time. 8 bits,
 * and columns that name their groups: a vector of codes at a time is multiplied and rounded. What is left at the end
 * of a group, and a group whose scale is not finite, is left to the scalar kernel. A file that includes this must
 * define load_int4: LANES 4-bit codes. */

/* `columns` (a multiple of 32) 4-bit codes of one group that begin at a whole byte. */
TARGET static void decode_int4(const uint8_t *codes, int64_t columns, float scale, float zero, uint16_t *out) {
    static const float steps[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    floats values[16 / LANES];
    for (int v = 0; v < 16 / LANES; v++)
        values[v] = mul_ps(sub_ps(loadu_ps(steps + v * LANES), set1_ps(zero)), set1_ps(scale));
    table16 table = load_table(values);
    for (int64_t c = 0; c < columns; c += 32) look_up_pairs(table, codes + c / 2, out + c);
}

/* Codes less their zero points, times their scales. */
TARGET static inline void store(ints codes, floats zeros, floats scales, uint16_t *out) {
    store_epi32_epi16(out, to_bf16(mul_ps(sub_ps(cvtepi32_ps(codes), zeros), scales)));
}

TARGET static inline ints load_int8(const uint8_t *codes, uint8_t flip) {
    return xor_si(load_epu8_epi32(codes), set1_epi32(flip));
}

/* `columns` (a multiple of LANES) codes of a row whose columns name their groups, from a whole byte on; whether all
 * scales were finite. */
TARGET static int decode_named(const kt_codes *row, int64_t columns, uint16_t *out) {
    ints largest = setzero_si(), magnitude = set1_epi32(0x7fffffff);
    floats zeros = set1_ps(kt_zero_point(row, 0));
    for (int64_t c = 0; c < columns; c += LANES) {
        ints group = loadu_si(row->column_groups + c);
        floats scales = gather_ps(row->scales, group);
        if (row->zeros) zeros = gather_ps(row->zeros, group);
        largest = max_epu32(largest, and_si(castps_si(scales), magnitude));
        store(row->bits == 4 ? load_int4(row->codes + c / 2) : load_int8(row->codes + c, row->flip), zeros, scales,
              out + c);
    }
    return !any_gt_epi32(largest, set1_epi32(0x7f7fffff));
}

TARGET static void decode_group(const kt_codes *part, int64_t columns, uint16_t *out) {
    int64_t group = part->first / part->group;
    float scale = part->scales[group], zero = kt_zero_point(part, group);
    if (part->bits == 4) {
        decode_int4(part->codes, columns, scale, zero, out);
        return;
    }
    floats scales = set1_ps(scale), zeros = set1_ps(zero);
    for (int64_t c = 0; c < columns; c += LANES) store(load_int8(part->codes + c, part->flip), zeros, scales, out + c);
}

TARGET void KERNEL_OF(decode_codes)(const kt_codes *row, uint16_t *out) {
    if (row->column_groups) {
        int64_t whole = row->bits == 4 && row->skip % 2 ? 0 : row->columns / LANES * LANES;
        kt_codes all = kt_select_codes(row, 0, row->columns);
        if (!decode_named(&all, whole, out)) whole = 0;
        kt_codes rest = kt_select_codes(row, whole, row->columns);
        kt_decode_codes_scalar(&rest, out + whole);
        return;
    }
    int64_t step = row->bits == 4 ? 32 : LANES, group = row->first / row->group;
    for (int64_t c = 0, stop; c < row->columns; c = stop, group++) {
        stop = kt_group_end(row, group);
        kt_codes part = kt_select_codes(row, c, stop);
        int64_t whole = part.skip == 0 && kt_is_finite(part.scales[group]) ? (stop - c) / step * step : 0;
        decode_group(&part, whole, out + c);
        if (c + whole == stop) continue;
        part = kt_select_codes(row, c + whole, stop);
        kt_decode_codes_scalar(&part, out + c + whole);
    }
}
