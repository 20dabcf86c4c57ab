/* Coordinate descent over the codes of a linear, row after row: each code goes to the nearest one of the value that is
 * best while all others stay. Knows no instruction set. */
#include <math.h>

#include "nearest_code.h"

int ktq_descend(int least, int most, int precision, int64_t n, int64_t k, int64_t group, const float *hessian,
                const float *diagonal, const float *scale, int8_t *codes, float *gradient, int64_t *changed) {
    if (least < INT8_MIN || least > 0 || most < 0 || most > INT8_MAX) return KTQ_EINVAL;
    if (precision < 0 || precision > 7) return KTQ_EINVAL;
    if (n < 1 || k < 1 || group < 1 || k % group) return KTQ_EINVAL;
    if (!hessian || !diagonal || !scale || !codes || !gradient || !changed) return KTQ_EINVAL;

    const kt_code_range range = {least, most, precision};
    const kt_kernels *kernels = kt_current();
    kt_fp_state state = kt_enter();
    int64_t count = 0;
    for (int64_t r = 0; r < n; r++) {
        float *g = gradient + r * k;
        for (int64_t j = 0; j < k; j++) {
            const float d = scale[r * (k / group) + j / group], curvature = diagonal[j] * d;
            /* Most codes: no other one is nearer. */
            if (fabsf(g[j]) < 0.49f * fabsf(curvature)) continue;
            if (!(diagonal[j] > 0) || curvature == 0) continue;
            int8_t *code = codes + r * k + j;
            float best = kt_nearest_code((float)*code + g[j] / curvature, &range);
            if (best == (float)*code || best != best) continue; /* NaN: a gradient that is not finite moves nothing */
            kernels->add_scaled(k, ((float)*code - best) * d, hessian + j * k, g);
            *code = (int8_t)best;
            count++;
        }
    }
    kt_leave(state);
    *changed = count;
    return KTQ_OK;
}
