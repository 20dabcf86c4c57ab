/* Products of integers: in AMX tiles of BF16, or of VNNI.
 *
 * A rounded activation (kt_round_units_fn) is a multiple of its unit. The products of KT_SUM_COLUMNS columns with codes
 * of 5 bits add up to less than 2^24 units (32 * 255 * 2^6 * 31), so that float32 holds each partial sum exactly, and
 * the order in which a tile adds does not matter. The same holds for activations of 8 bits, which tiles hold as
 * integers. VNNI gives the same sums, for few tokens faster; and those of codes of 6 and 8 bits, for which float32 or
 * BF16 is too small. Integers whose scales are shared by more columns are BF16, except with activations of 8 bits. */
#include "gemm_int16.h"

enum { TILE_BITS = 5, VNNI_TOKENS = 5, VNNI_INT8_TOKENS = 12 };

void kt_gemm_int16_amx(const kt_bf16_gemm *job) {
    const kt_bf16_panel *panel = job->panel;
    const int int8 = kt_has_int8(job), is_bf16 = panel->sum_columns > KT_SUM_COLUMNS && !int8;
    const int is_exact = (job->is_rounded || int8) && panel->bits <= TILE_BITS &&
                         job->m > (int8 ? VNNI_INT8_TOKENS : VNNI_TOKENS);
    (is_bf16 || is_exact ? kt_gemm_bf16_amx : kt_gemm_int16_avx512vnni)(job);
}
