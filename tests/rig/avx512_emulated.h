/* The AVX-512 intrinsics that native_quant/csrc uses, for CPUs that have only AVX2: included before every file of the
 * build that emulates them (tests/emulated.sh). Each name is a macro that replaces the compiler's function. Where AVX2
 * has the same operation, it computes both halves, so rounding, saturation, NaN and the modes of MXCSR are those of
 * AVX-512; the others are loops. A kernel that uses an intrinsic that is not here does not compile: add it. */
#ifndef KT_AVX512_EMULATED_H
#define KT_AVX512_EMULATED_H

#include <immintrin.h>
#include <stdint.h>

#define KT_EMULATED_AVX512 /* isa.h, cpu.c */
/* Names that are macros of the compiler's headers, too. */
#undef _mm512_setr_epi32
#undef _mm512_setr_epi64
#undef _mm256_dpbusd_epi32

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

typedef union {
    __m512i z;
    __m256i y[2];
    __m128i x[4];
    int8_t i8[64];
    uint8_t u8[64];
    int16_t i16[32];
    uint16_t u16[32];
    int32_t i32[16];
    uint32_t u32[16];
    int64_t i64[8];
} emulated;

/* f of both halves, which have the type HALF; in, a, b, c: vectors of 64 bytes of any type. The local variables of an
   inner macro may hide those of an outer one, because they are initialized with arguments only. */
#define AS_Z(value) ((emulated){.z = (__m512i)(value)})
#define FROM_HALVES(WHOLE, low, high) ((WHOLE)(emulated){.y = {(__m256i)(low), (__m256i)(high)}}.z)
#define HALVES_1(WHOLE, HALF, f, a, ...)                                                                               \
    ({                                                                                                                 \
        emulated a_ = AS_Z(a);                                                                                         \
        FROM_HALVES(WHOLE, f((HALF)a_.y[0], ##__VA_ARGS__), f((HALF)a_.y[1], ##__VA_ARGS__));                          \
    })
#define HALVES_2(WHOLE, HALF, f, a, b, ...)                                                                            \
    ({                                                                                                                 \
        emulated a_ = AS_Z(a), b_ = AS_Z(b);                                                                           \
        FROM_HALVES(WHOLE, f((HALF)a_.y[0], (HALF)b_.y[0], ##__VA_ARGS__),                                             \
                    f((HALF)a_.y[1], (HALF)b_.y[1], ##__VA_ARGS__));                                                   \
    })
#define HALVES_3(WHOLE, HALF, f, a, b, c)                                                                              \
    ({                                                                                                                 \
        emulated a_ = AS_Z(a), b_ = AS_Z(b), c_ = AS_Z(c);                                                             \
        FROM_HALVES(WHOLE, f((HALF)a_.y[0], (HALF)b_.y[0], (HALF)c_.y[0]),                                             \
                    f((HALF)a_.y[1], (HALF)b_.y[1], (HALF)c_.y[1]));                                                   \
    })
#define INTS_1(f, ...) HALVES_1(__m512i, __m256i, f, __VA_ARGS__)
#define INTS_2(f, ...) HALVES_2(__m512i, __m256i, f, __VA_ARGS__)
#define INTS_3(f, ...) HALVES_3(__m512i, __m256i, f, __VA_ARGS__)
#define FLOATS_2(f, ...) HALVES_2(__m512, __m256, f, __VA_ARGS__)
#define FLOATS_3(f, ...) HALVES_3(__m512, __m256, f, __VA_ARGS__)
#define DOUBLES_2(f, ...) HALVES_2(__m512d, __m256d, f, __VA_ARGS__)

/* float32 */
#define _mm512_add_ps(a, b) FLOATS_2(_mm256_add_ps, a, b)
#define _mm512_sub_ps(a, b) FLOATS_2(_mm256_sub_ps, a, b)
#define _mm512_mul_ps(a, b) FLOATS_2(_mm256_mul_ps, a, b)
#define _mm512_div_ps(a, b) FLOATS_2(_mm256_div_ps, a, b)
#define _mm512_min_ps(a, b) FLOATS_2(_mm256_min_ps, a, b)
#define _mm512_max_ps(a, b) FLOATS_2(_mm256_max_ps, a, b)
#define _mm512_fmadd_ps(a, b, c) FLOATS_3(_mm256_fmadd_ps, a, b, c)
#define _mm512_fnmadd_ps(a, b, c) FLOATS_3(_mm256_fnmadd_ps, a, b, c)
#define _mm512_shuffle_ps(a, b, order) FLOATS_2(_mm256_shuffle_ps, a, b, order)
#define _mm512_unpacklo_pd(a, b) DOUBLES_2(_mm256_unpacklo_pd, a, b)
#define _mm512_unpackhi_pd(a, b) DOUBLES_2(_mm256_unpackhi_pd, a, b)
/* For scale 0, with which vrndscaleps rounds to integers as vroundps does. */
#define _mm512_roundscale_ps(a, rounding) HALVES_1(__m512, __m256, _mm256_round_ps, a, rounding)
#define _mm512_cvtps_epi32(a) HALVES_1(__m512i, __m256, _mm256_cvtps_epi32, a)
#define _mm512_cvttps_epi32(a) HALVES_1(__m512i, __m256, _mm256_cvttps_epi32, a)
#define _mm512_cvtepi32_ps(a) HALVES_1(__m512, __m256i, _mm256_cvtepi32_ps, a)
#define _mm512_i32gather_ps(index, from, scale) HALVES_1(__m512, __m256i, GATHER, index, from, scale)
#define GATHER(index, from, scale) _mm256_i32gather_ps(from, index, scale)

/* Integers */
#define _mm512_abs_epi8(a) INTS_1(_mm256_abs_epi8, a)
#define _mm512_add_epi8(a, b) INTS_2(_mm256_add_epi8, a, b)
#define _mm512_add_epi16(a, b) INTS_2(_mm256_add_epi16, a, b)
#define _mm512_add_epi32(a, b) INTS_2(_mm256_add_epi32, a, b)
#define _mm512_sub_epi8(a, b) INTS_2(_mm256_sub_epi8, a, b)
#define _mm512_sub_epi16(a, b) INTS_2(_mm256_sub_epi16, a, b)
#define _mm512_sub_epi32(a, b) INTS_2(_mm256_sub_epi32, a, b)
#define _mm512_max_epu8(a, b) INTS_2(_mm256_max_epu8, a, b)
#define _mm512_max_epu16(a, b) INTS_2(_mm256_max_epu16, a, b)
#define _mm512_min_epu16(a, b) INTS_2(_mm256_min_epu16, a, b)
#define _mm512_max_epi32(a, b) INTS_2(_mm256_max_epi32, a, b)
#define _mm512_min_epi32(a, b) INTS_2(_mm256_min_epi32, a, b)
#define _mm512_max_epu32(a, b) INTS_2(_mm256_max_epu32, a, b)
#define _mm512_mullo_epi16(a, b) INTS_2(_mm256_mullo_epi16, a, b)
#define _mm512_mullo_epi32(a, b) INTS_2(_mm256_mullo_epi32, a, b)
#define _mm512_madd_epi16(a, b) INTS_2(_mm256_madd_epi16, a, b)
#define _mm512_maddubs_epi16(a, b) INTS_2(_mm256_maddubs_epi16, a, b)
#define _mm512_packs_epi16(a, b) INTS_2(_mm256_packs_epi16, a, b)
#define _mm512_packs_epi32(a, b) INTS_2(_mm256_packs_epi32, a, b)
#define _mm512_packus_epi16(a, b) INTS_2(_mm256_packus_epi16, a, b)
#define _mm512_packus_epi32(a, b) INTS_2(_mm256_packus_epi32, a, b)
#define _mm512_shuffle_epi8(a, b) INTS_2(_mm256_shuffle_epi8, a, b)
#define _mm512_unpacklo_epi8(a, b) INTS_2(_mm256_unpacklo_epi8, a, b)
#define _mm512_unpackhi_epi8(a, b) INTS_2(_mm256_unpackhi_epi8, a, b)
#define _mm512_unpacklo_epi16(a, b) INTS_2(_mm256_unpacklo_epi16, a, b)
#define _mm512_unpackhi_epi16(a, b) INTS_2(_mm256_unpackhi_epi16, a, b)
#define _mm512_unpacklo_epi32(a, b) INTS_2(_mm256_unpacklo_epi32, a, b)
#define _mm512_unpackhi_epi32(a, b) INTS_2(_mm256_unpackhi_epi32, a, b)
#define _mm512_unpacklo_epi64(a, b) INTS_2(_mm256_unpacklo_epi64, a, b)
#define _mm512_unpackhi_epi64(a, b) INTS_2(_mm256_unpackhi_epi64, a, b)
#define _mm512_slli_epi16(a, count) INTS_1(_mm256_slli_epi16, a, count)
#define _mm512_slli_epi32(a, count) INTS_1(_mm256_slli_epi32, a, count)
#define _mm512_slli_epi64(a, count) INTS_1(_mm256_slli_epi64, a, count)
#define _mm512_srli_epi16(a, count) INTS_1(_mm256_srli_epi16, a, count)
#define _mm512_srli_epi32(a, count) INTS_1(_mm256_srli_epi32, a, count)
#define _mm512_srai_epi16(a, count) INTS_1(_mm256_srai_epi16, a, count)
#define _mm512_srlv_epi32(a, counts) INTS_2(_mm256_srlv_epi32, a, counts)
#define _mm512_and_si512(a, b) INTS_2(_mm256_and_si256, a, b)
#define _mm512_or_si512(a, b) INTS_2(_mm256_or_si256, a, b)
#define _mm512_xor_si512(a, b) INTS_2(_mm256_xor_si256, a, b)

/* Dot products: AVX-512 VNNI and BF16 */
#define _mm256_dpbusd_epi32 emulated_dpbusd
#define _mm512_dpbusd_epi32(sum, a, b) INTS_3(emulated_dpbusd, sum, a, b)
#define _mm512_dpwssd_epi32(sum, a, b) _mm512_add_epi32(sum, _mm512_madd_epi16(a, b))
#define _mm512_dpbf16_ps(sum, a, b) FLOATS_3(emulated_dpbf16, sum, (__m512i)(a), (__m512i)(b))

/* Two products of unsigned and signed bytes do not fit into 16 bits: even and odd bytes are multiplied as words. */
static inline __m256i emulated_dpbusd(__m256i sum, __m256i unsigned_bytes, __m256i bytes) {
    const __m256i low = _mm256_set1_epi16(0xff);
    __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), odd = _mm256_srai_epi16(bytes, 8);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_and_si256(unsigned_bytes, low), even));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_srli_epi16(unsigned_bytes, 8), odd));
}

/* VDPBF16PS as Intel SDM volume 2 has it: fused, the odd numbers first, to nearest even, subnormals are 0, whatever
   MXCSR says. */
static inline __m256 emulated_dpbf16(__m256 sum, __m256 a, __m256 b) {
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
    __m256i odd_a = _mm256_and_si256((__m256i)a, upper), odd_b = _mm256_and_si256((__m256i)b, upper);
    __m256i even_a = _mm256_slli_epi32((__m256i)a, 16), even_b = _mm256_slli_epi32((__m256i)b, 16);
    unsigned before, mode = 0x9fc0; /* to nearest even, FTZ and DAZ, no exceptions */
    __asm__ volatile("vstmxcsr %1\n\tvldmxcsr %2\n\t"
                     "vfmadd231ps %4, %3, %0\n\tvfmadd231ps %6, %5, %0\n\t"
                     "vldmxcsr %1"
                     : "+&x"(sum), "=&m"(before)
                     : "m"(mode), "x"(odd_a), "x"(odd_b), "x"(even_a), "x"(even_b));
    return sum;
}

/* Memory. Accesses that must be aligned are checked. */
#define ALIGNED(p)                                                                                                     \
    ({                                                                                                                 \
        const void *p_ = (p);                                                                                          \
        if ((uintptr_t)p_ % 64) __builtin_trap();                                                                      \
        (void *)p_;                                                                                                    \
    })
typedef __m512i emulated_ints __attribute__((aligned(1), may_alias));
typedef __m512 emulated_floats __attribute__((aligned(1), may_alias));
#define _mm512_load_si512(p) (*(const emulated_ints *)ALIGNED(p))
#define _mm512_load_ps(p) (*(const emulated_floats *)ALIGNED(p))
#define _mm512_loadu_si512(p) (*(const emulated_ints *)(p))
#define _mm512_loadu_ps(p) (*(const emulated_floats *)(p))
#define _mm512_store_si512(p, a) ((void)(*(emulated_ints *)ALIGNED(p) = (a)))
#define _mm512_store_ps(p, a) ((void)(*(emulated_floats *)ALIGNED(p) = (a)))
#define _mm512_storeu_si512(p, a) ((void)(*(emulated_ints *)(p) = (a)))
#define _mm512_storeu_ps(p, a) ((void)(*(emulated_floats *)(p) = (a)))

/* Constants, parts and conversions */
#define REPEATED(WHOLE, half)                                                                                          \
    ({                                                                                                                 \
        __m256i half_ = (__m256i)(half);                                                                               \
        FROM_HALVES(WHOLE, half_, half_);                                                                              \
    })
#define _mm512_setzero_si512() ((__m512i){0})
#define _mm512_setzero_ps() ((__m512){0})
#define _mm512_set1_epi8(value) REPEATED(__m512i, _mm256_set1_epi8(value))
#define _mm512_set1_epi16(value) REPEATED(__m512i, _mm256_set1_epi16(value))
#define _mm512_set1_epi32(value) REPEATED(__m512i, _mm256_set1_epi32(value))
#define _mm512_set1_ps(value) REPEATED(__m512, _mm256_set1_ps(value))
#define _mm512_setr_epi32(...) ((emulated){.i32 = {__VA_ARGS__}}.z)
#define _mm512_setr_epi64(...) ((emulated){.i64 = {__VA_ARGS__}}.z)
#define _mm512_broadcast_i32x4(a) REPEATED(__m512i, _mm256_broadcastsi128_si256(a))
#define _mm512_broadcast_i64x4(a) REPEATED(__m512i, a)

#define _mm512_castps_si512(a) ((__m512i)(a))
#define _mm512_castsi512_ps(a) ((__m512)(a))
#define _mm512_castps_pd(a) ((__m512d)(a))
#define _mm512_castpd_ps(a) ((__m512)(a))
#define _mm512_castsi512_si256(a) (AS_Z(a).y[0])
#define _mm512_castps512_ps256(a) ((__m256)AS_Z(a).y[0])
/* The upper bytes are undefined: no zeros. */
#define _mm512_castsi256_si512(a) FROM_HALVES(__m512i, a, _mm256_set1_epi8(0x5a))
#define _mm512_castsi128_si512(a) _mm512_castsi256_si512(_mm256_set_m128i(_mm_set1_epi8(0x5a), a))
#define _mm512_extracti64x4_epi64(a, part) (AS_Z(a).y[part])
#define _mm512_extractf32x8_ps(a, part) ((__m256)AS_Z(a).y[part])
#define INSERT(a, member, part, value)                                                                                 \
    ({                                                                                                                 \
        emulated a_ = AS_Z(a);                                                                                         \
        a_.member[part] = (value);                                                                                     \
        a_.z;                                                                                                          \
    })
#define _mm512_inserti32x4(a, value, part) INSERT(a, x, part, value)
#define _mm512_inserti64x4(a, value, part) INSERT(a, y, part, value)

static inline __m512i emulated_shuffle_lanes(__m512i a, __m512i b, int order) {
    emulated from[2] = {{a}, {b}}, to;
    for (int i = 0; i < 4; i++) to.x[i] = from[i / 2].x[order >> 2 * i & 3];
    return to.z;
}
#define _mm512_shuffle_i32x4(a, b, order) emulated_shuffle_lanes(a, b, order)
#define _mm512_shuffle_f32x4(a, b, order) ((__m512)emulated_shuffle_lanes((__m512i)(a), (__m512i)(b), order))

#define WIDEN(name, shift, a)                                                                                          \
    ({                                                                                                                 \
        __m128i a_ = (a);                                                                                              \
        FROM_HALVES(__m512i, name(a_), name(_mm_srli_si128(a_, shift)));                                               \
    })
#define WIDEN_HALVES(WHOLE, name, a)                                                                                   \
    ({                                                                                                                 \
        __m256i a_ = (a);                                                                                              \
        FROM_HALVES(WHOLE, name(_mm256_castsi256_si128(a_)), name(_mm256_extracti128_si256(a_, 1)));                   \
    })
#define _mm512_cvtepu8_epi32(a) WIDEN(_mm256_cvtepu8_epi32, 8, a)
#define _mm512_cvtepi8_epi32(a) WIDEN(_mm256_cvtepi8_epi32, 8, a)
#define _mm512_cvtepu8_epi64(a) WIDEN(_mm256_cvtepu8_epi64, 4, a)
#define _mm512_cvtepu8_epi16(a) WIDEN_HALVES(__m512i, _mm256_cvtepu8_epi16, a)
#define _mm512_cvtepi8_epi16(a) WIDEN_HALVES(__m512i, _mm256_cvtepi8_epi16, a)
#define _mm512_cvtepu16_epi32(a) WIDEN_HALVES(__m512i, _mm256_cvtepu16_epi32, a)
#define _mm512_cvtph_ps(a) WIDEN_HALVES(__m512, _mm256_cvtph_ps, a)

/* A function of vectors of 64 bytes that sets `count` elements of `to`, from a, b and c. */
#define DEFINE_LOOP(name, RESULT, result, count, element, value, ...)                                                  \
    static inline RESULT emulated_##name(__VA_ARGS__) {                                                                \
        emulated to;                                                                                                   \
        for (int i = 0; i < count; i++) to.element[i] = value;                                                         \
        return to.result;                                                                                              \
    }
DEFINE_LOOP(cvtepi32_epi16, __m256i, y[0], 16, u16, (uint16_t)a.u32[i], emulated a)
DEFINE_LOOP(cvtepi32_epi8, __m128i, x[0], 16, u8, (uint8_t)a.u32[i], emulated a)
DEFINE_LOOP(cvtepi16_epi8, __m256i, y[0], 32, u8, (uint8_t)a.u16[i], emulated a)
DEFINE_LOOP(srlv_epi16, __m512i, z, 32, u16, (uint16_t)(b.u16[i] > 15 ? 0 : a.u16[i] >> b.u16[i]), emulated a,
            emulated b)
DEFINE_LOOP(permutexvar_epi16, __m512i, z, 32, u16, a.u16[index.u16[i] & 31], emulated index, emulated a)
DEFINE_LOOP(permutexvar_epi32, __m512i, z, 16, u32, a.u32[index.u32[i] & 15], emulated index, emulated a)
DEFINE_LOOP(permutexvar_epi64, __m512i, z, 8, i64, a.i64[index.i64[i] & 7], emulated index, emulated a)
DEFINE_LOOP(permutex2var_epi16, __m512i, z, 32, u16,
            index.u16[i] & 32 ? b.u16[index.u16[i] & 31] : a.u16[index.u16[i] & 31], emulated a, emulated index,
            emulated b)
DEFINE_LOOP(permutex2var_epi8, __m512i, z, 64, u8,
            index.u8[i] & 64 ? b.u8[index.u8[i] & 63] : a.u8[index.u8[i] & 63], emulated a, emulated index,
            emulated b)
DEFINE_LOOP(mask_mov_epi8, __m512i, z, 64, u8, m >> i & 1 ? a.u8[i] : old.u8[i], emulated old, __mmask64 m, emulated a)
DEFINE_LOOP(mask_mov_epi16, __m512i, z, 32, u16, m >> i & 1 ? a.u16[i] : old.u16[i], emulated old, __mmask32 m,
            emulated a)
DEFINE_LOOP(mask_mov_epi32, __m512i, z, 16, u32, m >> i & 1 ? a.u32[i] : old.u32[i], emulated old, __mmask16 m,
            emulated a)
#define _mm512_cvtepi32_epi16(a) emulated_cvtepi32_epi16(AS_Z(a))
#define _mm512_cvtepi32_epi8(a) emulated_cvtepi32_epi8(AS_Z(a))
#define _mm512_cvtepi16_epi8(a) emulated_cvtepi16_epi8(AS_Z(a))
#define _mm512_srlv_epi16(a, counts) emulated_srlv_epi16(AS_Z(a), AS_Z(counts))
#define _mm512_permutexvar_epi16(index, a) emulated_permutexvar_epi16(AS_Z(index), AS_Z(a))
#define _mm512_permutexvar_epi32(index, a) emulated_permutexvar_epi32(AS_Z(index), AS_Z(a))
#define _mm512_permutexvar_ps(index, a) ((__m512)_mm512_permutexvar_epi32(index, a))
#define _mm512_permutexvar_epi64(index, a) emulated_permutexvar_epi64(AS_Z(index), AS_Z(a))
#define _mm512_permutex2var_epi16(a, index, b) emulated_permutex2var_epi16(AS_Z(a), AS_Z(index), AS_Z(b))
#define _mm512_permutex2var_epi8(a, index, b) emulated_permutex2var_epi8(AS_Z(a), AS_Z(index), AS_Z(b))
#define _mm512_mask_mov_epi8(old, mask, a) emulated_mask_mov_epi8(AS_Z(old), mask, AS_Z(a))
#define _mm512_mask_mov_epi16(old, mask, a) emulated_mask_mov_epi16(AS_Z(old), mask, AS_Z(a))
#define _mm512_mask_mov_epi32(old, mask, a) emulated_mask_mov_epi32(AS_Z(old), mask, AS_Z(a))
#define _mm512_mask_sub_epi8(old, mask, a, b) _mm512_mask_mov_epi8(old, mask, _mm512_sub_epi8(a, b))

/* Bit i of a mask is whether a condition holds for element i. */
#define DEFINE_MASK(name, MASK, count, condition, ...)                                                                 \
    static inline MASK emulated_##name(__VA_ARGS__) {                                                                  \
        MASK mask = 0;                                                                                                 \
        for (int i = 0; i < count; i++) mask |= (MASK)((MASK)(condition) << i);                                        \
        return mask;                                                                                                   \
    }
DEFINE_MASK(movepi8_mask, __mmask64, 64, a.i8[i] < 0, emulated a)
DEFINE_MASK(cmpgt_epi8_mask, __mmask64, 64, a.i8[i] > b.i8[i], emulated a, emulated b)
DEFINE_MASK(cmpgt_epu8_mask, __mmask64, 64, a.u8[i] > b.u8[i], emulated a, emulated b)
DEFINE_MASK(cmpeq_epi16_mask, __mmask32, 32, a.u16[i] == b.u16[i], emulated a, emulated b)
DEFINE_MASK(cmpeq_epi32_mask, __mmask16, 16, a.u32[i] == b.u32[i], emulated a, emulated b)
DEFINE_MASK(cmpgt_epi32_mask, __mmask16, 16, a.i32[i] > b.i32[i], emulated a, emulated b)
#define _mm512_movepi8_mask(a) emulated_movepi8_mask(AS_Z(a))
#define _mm512_cmpgt_epi8_mask(a, b) emulated_cmpgt_epi8_mask(AS_Z(a), AS_Z(b))
#define _mm512_cmpgt_epu8_mask(a, b) emulated_cmpgt_epu8_mask(AS_Z(a), AS_Z(b))
#define _mm512_cmpeq_epi16_mask(a, b) emulated_cmpeq_epi16_mask(AS_Z(a), AS_Z(b))
#define _mm512_cmpeq_epi32_mask(a, b) emulated_cmpeq_epi32_mask(AS_Z(a), AS_Z(b))
#define _mm512_cmpgt_epi32_mask(a, b) emulated_cmpgt_epi32_mask(AS_Z(a), AS_Z(b))
/* A comparison of floats gives lanes of ones or zeros. */
#define _mm512_cmp_ps_mask(a, b, kind)                                                                                 \
    ((__mmask16)_mm512_cmpgt_epi32_mask(_mm512_setzero_si512(), FLOATS_2(_mm256_cmp_ps, a, b, kind)))

/* Bit 4a + 2b + c of `table` is the result for the bits a, b and c. */
static inline __m512i emulated_ternarylogic(__m512i a, __m512i b, __m512i c, int table) {
    __m512i result = {0};
    for (int i = 0; i < 8; i++)
        if (table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return result;
}
#define _mm512_ternarylogic_epi32(a, b, c, table) emulated_ternarylogic(a, b, c, table)

static inline int emulated_reduce_add(emulated a) {
    uint32_t sum = 0;
    for (int i = 0; i < 16; i++) sum += a.u32[i];
    return (int)sum;
}
static inline unsigned emulated_reduce_max(emulated a) {
    uint32_t most = 0;
    for (int i = 0; i < 16; i++) most = a.u32[i] > most ? a.u32[i] : most;
    return most;
}
#define _mm512_reduce_add_epi32(a) emulated_reduce_add(AS_Z(a))
#define _mm512_reduce_max_epu32(a) emulated_reduce_max(AS_Z(a))

#pragma GCC pop_options

#endif
