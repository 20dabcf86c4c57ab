/* One rounding to nearest even, and the sign of the value. */
#include <math.h>

#include "bf16.h"
#include "kernels.h"

void kt_scale_codes_scalar(const kt_scale_search *search, float ratio, int8_t *codes) {
    for (int64_t c = 0; c < search->k; c++) {
        float q = fmaf(search->units[c], ratio, KT_ROUND) - KT_ROUND;
        int code = (int)(q < search->largest ? q : search->largest);
        codes[c] = (int8_t)(kt_load16(search->row + 2 * c) & 0x8000 ? -code : code);
    }
}
