/* FP8 E4M3 to BF16, AVX-512 VBMI. */
#include "vectors_avx512.h"
#undef TARGET
#define TARGET KT_TARGET_AVX512BF16
#undef KERNEL_OF
#define KERNEL_OF(family) kt_##family##_avx512bf16
#include "fp8_to_bf16_avx512bf16.h"

#include "chunk_fp8_template.h"
