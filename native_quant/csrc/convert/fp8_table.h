/* FP8 E4M3 times one scale as BF16, by table. All codes with the same fraction give the same BF16 fraction, and
 * exponents just add up, so 16 + 8 entries stand for 256 codes as long as no result is subnormal or overflows:
 *
 *   code    s eee e mmm                    entry e mmm of `normal`:  bf16((8 + mmm) * 2^(e - 10) * scale)
 *             |   |_____ entry             plus eee << 8: two exponent steps are 1 in the upper byte of BF16
 *             |_________ added to the      codes below 8, which are subnormal:
 *                        upper byte        entry mmm of `subnormal`: bf16(mmm * 2^-9 * scale)
 *
 * vpshufb looks 16 bytes up at once: one table for the lower bytes of BF16, one for the upper. It takes the lower 4
 * bits of a code as they are. NaN (0x7f, 0xff) would come out as 480: a kernel that finds one has the scalar kernel
 * redo that piece.
 */
#ifndef KT_FP8_TABLE_H
#define KT_FP8_TABLE_H

#include <math.h>

/* The values of the entries for scale 1: 16 of `normal`, 8 of `subnormal`, 8 that are never looked up. */
static const float kt_fp8_entries[32] = {
    0x8p-10f, 0x9p-10f, 0xap-10f, 0xbp-10f, 0xcp-10f, 0xdp-10f, 0xep-10f, 0xfp-10f, /* e = 0 */
    0x8p-9f,  0x9p-9f,  0xap-9f,  0xbp-9f,  0xcp-9f,  0xdp-9f,  0xep-9f,  0xfp-9f,  /* e = 1 */
    0x0p-9f,  0x1p-9f,  0x2p-9f,  0x3p-9f,  0x4p-9f,  0x5p-9f,  0x6p-9f,  0x7p-9f,  /* subnormal */
};

/* Far from results that are subnormal (scale * 2^-10) or overflow (scale * 2^9). */
static inline int kt_fp8_table_holds(float scale) {
    float magnitude = fabsf(scale);
    return magnitude >= 0x1p-100f && magnitude <= 0x1p100f;
}

#endif
