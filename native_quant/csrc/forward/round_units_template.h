/* Activations as multiples of their units: 1.5 * 2^23 units, which have no bits for less than a unit, are added to them
 * and subtracted. */
#include "find_most_template.h"
#include "gemm_int16.h"

TARGET void KERNEL_OF(round_units)(int64_t columns, uint16_t *a) {
    for (int64_t j = 0; j < columns; j += KT_SUM_COLUMNS, a += KT_SUM_COLUMNS) {
        const floats many = set1_ps(0x1.8p23f * kt_int16_unit(find_most(a)));
        for (int i = 0; i < KT_SUM_COLUMNS; i += AT_ONCE) {
            const ints x = loadu_si(a + i);
            const floats even = sub_ps(add_ps(castsi_ps(slli_epi32(x, 16)), many), many),
                         odd = sub_ps(add_ps(castsi_ps(and_si(x, set1_epi32(0xffff0000))), many), many);
            storeu_si(a + i, odd_epi16(castps_si(odd), srli_epi32(castps_si(even), 16)));
        }
    }
}
