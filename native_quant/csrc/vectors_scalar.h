/* The vector operations of a template (FAMILY_template.h) for one float32 element: the scalar kernels of families
 * whose arithmetic is written once for all widths. Names and meanings: arch/x86/vectors.h. */
#ifndef KT_VECTORS_SCALAR_H
#define KT_VECTORS_SCALAR_H

#include <math.h>

#include "bf16.h"
#include "kernels.h"

#define TARGET
#define KERNEL_OF(family) kt_##family##_scalar
enum { LANES = 1, VECTOR_BYTES = 4, REGISTERS = 128 }; /* as many floats as AVX2's registers have */

typedef float floats;
typedef uint32_t ints;

#define add_ps(a, b) ((a) + (b))
#define sub_ps(a, b) ((a) - (b))
#define mul_ps(a, b) ((a) * (b))
#define div_ps(a, b) ((a) / (b))
#define fmadd_ps(a, b, c) fmaf(a, b, c)
#define set1_ps(x) (x)
#define set1_epi32(x) ((uint32_t)(x))
#define setzero_ps() 0.0f
#define loadu_ps(p) (*(p))
#define storeu_ps(p, x) (*(p) = (x))
#define loadu_si(p) load_word(p)
#define fetch_to_l2(p) ((void)(p))
#define castps_si(x) kt_bits(x)
#define castsi_ps(x) kt_float(x)
#define and_si(a, b) ((a) & (b))
#define or_si(a, b) ((a) | (b))
#define add_epi32(a, b) ((a) + (b))
#define slli_epi32(a, n) ((a) << (n))
#define gt_epi32(a, b) ((int32_t)(a) > (int32_t)(b))
#define where_epi32(condition, then, otherwise) ((condition) ? (then) : (otherwise))

static inline ints load_word(const uint8_t *p) {
    ints word;
    memcpy(&word, p, sizeof word);
    return word;
}
/* The second operand where one is NaN, as on x86. */
static inline float min_ps(float a, float b) {
    return a < b ? a : b;
}
static inline float max_ps(float a, float b) {
    return a > b ? a : b;
}

#endif
