/* A group of FP4 codes is looked up in the products of its scale; FP8 codes are multiplied. What is left at the end of
 * a group, FP8 NaN, and a group whose scale is not finite, are left to the scalar kernel. A file that includes this
 * must define decode_fp4: `columns` (a multiple of 16) codes that begin at a whole byte. */

/* `columns` (a multiple of 2 * LANES) FP8 codes; whether none was NaN. A code, shifted, is the FP16 value that is 2^-8
 * of its own; so `scale` is 2^8 of theirs. */
TARGET static inline int decode_fp8(const uint8_t *codes, int64_t columns, floats scale, uint16_t *out) {
    ints largest = setzero_si();
    for (int64_t c = 0; c < columns; c += 2 * LANES) {
        ints code = load_epu8_epi16(codes + c), magnitude = and_si(code, set1_epi16(0x7f));
        largest = max_epu16(largest, magnitude);
        ints sign = slli_epi16(xor_si(code, magnitude), 8), fp16 = or_si(slli_epi16(magnitude, 7), sign);
        store_epi32_epi16(out + c, to_bf16(mul_ps(halves_ps(fp16, 0), scale)));
        store_epi32_epi16(out + c + LANES, to_bf16(mul_ps(halves_ps(fp16, 1), scale)));
    }
    return !any_gt_epu8(largest, set1_epi8(0x7e));
}

TARGET void KERNEL_OF(decode_floats)(const kt_floats *row, uint16_t *out) {
    const float *scale = row->scales + row->first / row->group;
    int64_t end = row->group - row->first % row->group; /* of the group */
    for (int64_t c = 0; c < row->columns; c = end, end += row->group, scale++) {
        int64_t columns = (end < row->columns ? end : row->columns) - c, at = row->skip + c;
        int64_t step = row->kind == KTQ_FP8_E4M3 ? 2 * LANES : 16;
        int64_t whole = kt_is_finite(*scale * 0x1p8f) ? columns / step * step : 0;
        if (row->kind == KTQ_FP8_E4M3) {
            if (!decode_fp8(row->codes + at, whole, set1_ps(*scale * 0x1p8f), out + c)) whole = 0;
        } else {
            if (at % 2) whole = 0;
            decode_fp4(row->codes + at / 2, whole, set1_ps(*scale), out + c);
        }
        if (whole == columns) continue;
        kt_floats rest = kt_group_floats(row, scale, c + whole, columns - whole);
        kt_decode_floats_scalar(&rest, out + c + whole);
    }
}
