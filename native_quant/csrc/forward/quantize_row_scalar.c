/* Activations to int8, one scale per row (numerics.md, section 5). */
#include "bf16.h"
#include "kernels.h"

/* Adding it leaves no place for a fraction: rounds to nearest even, and the integer stands in the low bits. */
#define ROUND_TO_INTEGER 0x1.8p23f

static float value(int is_bf16, const void *x, int64_t j) {
    return is_bf16 ? kt_from_bf16(((const uint16_t *)x)[j]) : ((const float *)x)[j];
}

float kt_quantize_row_scalar(int is_bf16, const void *x, int64_t k, int64_t copies, const kt_code_row *place,
                             int32_t *sums, int64_t *energy) {
    uint32_t amax = 0;
    for (int64_t j = 0; j < k; j++) {
        uint32_t magnitude = kt_bits(value(is_bf16, x, j)) & 0x7fffffff;
        if (magnitude > amax) amax = magnitude;
    }
    int finite = amax < 0x7f800000;
    float scale = finite ? kt_float(amax) * (1.0f / 127.0f) : kt_float(0x7fc00000);
    float reciprocal = finite && scale != 0 ? 1.0f / scale : 0;
    *energy = 0;
    for (int64_t first = 0; first < k; first += KT_K_BLOCK) {
        int32_t sum = 0;
        for (int64_t j = first; j < k && j < first + KT_K_BLOCK; j++) {
            float product = finite ? value(is_bf16, x, j) * reciprocal : 0;
            int8_t code = (int8_t)(kt_bits(product + ROUND_TO_INTEGER) - kt_bits(ROUND_TO_INTEGER));
            for (int64_t i = 0; i < copies; i++) place[i].q[j / 64 * place[i].pitch + j % 64] = code;
            sum += code;
            *energy += code * code;
        }
        sums[first / KT_K_BLOCK] = sum;
    }
    return scale;
}
