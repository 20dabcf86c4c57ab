/* FP16, F32 and FP8 E4M3 to BF16, rounded once, from float32, to nearest even. */
#include "bf16.h"
#include "kernels.h"

/* E4M3 "fn" (OCP 8-bit floating point 1.0): 4 exponent bits (bias 7), 3 fraction bits; no infinity, NaN is all ones. */
static float magnitude_of_fp8(uint8_t b) {
    uint32_t exponent = b >> 3 & 15, fraction = b & 7;
    if ((b & 0x7f) == 0x7f) return kt_float(0x7fc00000);
    if (exponent == 0) return (float)fraction * 0x1p-9f;
    return kt_float((exponent + 120) << 23 | fraction << 20);
}

static uint16_t decode_one(int kind, const uint8_t *in, float scale) {
    float x;
    switch (kind) {
    case KTQ_FP16: return kt_to_bf16(kt_from_fp16(kt_load16(in)));
    case KTQ_F32: memcpy(&x, in, sizeof x); return kt_to_bf16(x);
    /* The sign is put on last, so that a NaN has one too. */
    case KTQ_FP8_E4M3: return kt_to_bf16(magnitude_of_fp8(*in) * scale) ^ (uint16_t)((*in & 0x80) << 8);
    }
    return kt_load16(in);
}

void kt_decode_scalar(int kind, const uint8_t *in, int64_t in_stride, int64_t rows, int64_t columns, float scale,
                      uint16_t *out, int64_t out_pitch) {
    int bytes = kt_column_bits(kind) / 8;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++)
            out[r * out_pitch + c] = decode_one(kind, in + r * in_stride + c * bytes, scale);
}
