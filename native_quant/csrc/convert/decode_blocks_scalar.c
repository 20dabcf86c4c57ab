/* Blocks of ggml to BF16: rounded once, from float32, to nearest even. */
#include "ggml_blocks.h"

static void q4_0_to_bf16(const kt_q4_0 *block, uint16_t *out) {
    float d = kt_from_fp16(kt_load16(block->d));
    for (int j = 0; j < 16; j++) {
        out[j] = kt_to_bf16(d * kt_nibbles_less_8[block->q[j] & 15]);
        out[j + 16] = kt_to_bf16(d * kt_nibbles_less_8[block->q[j] >> 4]);
    }
}

static void q8_0_to_bf16(const kt_q8_0 *block, uint16_t *out) {
    float d = kt_from_fp16(kt_load16(block->d));
    for (int j = 0; j < 32; j++) out[j] = kt_to_bf16(d * (float)block->q[j]);
}

static void mxfp4_to_bf16(const kt_ggml_mxfp4 *block, uint16_t *out) {
    float d = kt_half_e8m0(block->e);
    for (int j = 0; j < 16; j++) {
        out[j] = kt_to_bf16(d * kt_doubled_e2m1[block->q[j] & 15]);
        out[j + 16] = kt_to_bf16(d * kt_doubled_e2m1[block->q[j] >> 4]);
    }
}

static void q4_k_to_bf16(const kt_q4_k *block, uint16_t *out) {
    kt_k_scales k = kt_unpack_k_scales(block->d, block->least, block->scales);
    for (int c = 0; c < 256; c++) {
        int g = c / 32, code = block->q[g / 2 * 32 + c % 32] >> g % 2 * 4 & 15;
        out[c] = kt_to_bf16(k.scale[g] * (float)code - k.least[g]);
    }
}

static void q5_k_to_bf16(const kt_q5_k *block, uint16_t *out) {
    kt_k_scales k = kt_unpack_k_scales(block->d, block->least, block->scales);
    for (int c = 0; c < 256; c++) {
        int g = c / 32, code = block->q[g / 2 * 32 + c % 32] >> g % 2 * 4 & 15;
        code |= (block->high[c % 32] >> g & 1) << 4;
        out[c] = kt_to_bf16(k.scale[g] * (float)code - k.least[g]);
    }
}

static void q6_k_to_bf16(const kt_q6_k *block, uint16_t *out) {
    float d = kt_from_fp16(kt_load16(block->d));
    for (int c = 0; c < 256; c++) {
        int half = c / 128, quarter = c % 128 / 32, j = c % 32;
        int low = block->low[half * 64 + quarter % 2 * 32 + j] >> quarter / 2 * 4 & 15;
        int code = (low | (block->high[half * 32 + j] >> 2 * quarter & 3) << 4) - 32;
        out[c] = kt_to_bf16(d * (float)block->scales[c / 16] * (float)code);
    }
}

void kt_decode_blocks_scalar(int kind, const uint8_t *blocks, int64_t count, uint16_t *out) {
    kt_block size = kt_get_block(kind);
    for (; count > 0; count--, blocks += size.bytes, out += size.columns) {
        switch (kind) {
        case KTQ_Q4_0: q4_0_to_bf16((const kt_q4_0 *)blocks, out); break;
        case KTQ_Q8_0: q8_0_to_bf16((const kt_q8_0 *)blocks, out); break;
        case KTQ_GGML_MXFP4: mxfp4_to_bf16((const kt_ggml_mxfp4 *)blocks, out); break;
        case KTQ_Q4_K: q4_k_to_bf16((const kt_q4_k *)blocks, out); break;
        case KTQ_Q5_K: q5_k_to_bf16((const kt_q5_k *)blocks, out); break;
        case KTQ_Q6_K: q6_k_to_bf16((const kt_q6_k *)blocks, out); break;
        }
    }
}
