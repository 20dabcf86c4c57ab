/* The activations of experts: each function of gate and up with its partial derivatives, written once for scalars and
 * for vectors (numerics.md, section 5d). An activation is one function here, one ACTIVATION line below it and one row
 * of kernels.def. */
#ifndef KT_ACTIVATIONS_TEMPLATE_H
#define KT_ACTIVATIONS_TEMPLATE_H

#include <math.h>

#include "exponential_template.h"

typedef struct {
    floats value, by_gate, by_up; /* by_gate, by_up: partial derivatives */
} kt_value;

/* Parameters of ktq_function in every lane; without a limit: infinity. */
typedef struct {
    floats limit, alpha, beta;
    int has_beta;
} kt_parameters;

TARGET static inline floats negate(floats x) {
    return sub_ps(setzero_ps(), x);
}
TARGET static inline floats without_sign(floats x) {
    return castsi_ps(and_si(castps_si(x), set1_epi32(0x7fffffff)));
}

/* min(x, most), and x between -most and most. A NaN stays. */
TARGET static inline floats limit_above(floats x, floats most) {
    return min_ps(most, x);
}
TARGET static inline floats limit_both(floats x, floats most) {
    return max_ps(negate(most), min_ps(most, x));
}
/* `slope` where the magnitude of x (is_upper: x) is not above `most`, else 0. */
TARGET static inline floats slope_within(floats x, floats most, int is_upper, floats slope) {
    floats excess = sub_ps(is_upper ? x : without_sign(x), most); /* inf - inf is NaN: counts as within */
    ints zero = set1_epi32(0);
    return castsi_ps(where_epi32(gt_epi32(castps_si(excess), zero), zero, castps_si(slope)));
}

TARGET static inline floats sigmoid(floats x) {
    const floats one = set1_ps(1.0f);
    return div_ps(one, add_ps(one, kt_exp(min_ps(set1_ps(88.0f), negate(x)))));
}

/* A series near 0, where 1 - exp(-2x) would cancel; its error is below 3e-8 of the value. */
TARGET static inline floats hyperbolic_tangent(floats x) {
    const floats one = set1_ps(1.0f), edge = set1_ps(0.25f);
    floats size = without_sign(x), square = mul_ps(x, x), series = set1_ps(62.0f / 2835.0f);
    series = fmadd_ps(series, square, set1_ps(-17.0f / 315.0f));
    series = fmadd_ps(series, square, set1_ps(2.0f / 15.0f));
    series = fmadd_ps(series, square, set1_ps(-1.0f / 3.0f));
    series = fmadd_ps(mul_ps(series, square), x, x);
    floats power = kt_exp(mul_ps(set1_ps(-2.0f), size));
    floats quotient = div_ps(sub_ps(one, power), add_ps(one, power));
    ints sign = and_si(castps_si(x), set1_epi32(0x80000000));
    return castsi_ps(where_epi32(gt_epi32(castps_si(size), castps_si(edge)), or_si(castps_si(quotient), sign),
                                 castps_si(series)));
}

/* silu(gate) * up, both limited before it. */
TARGET static inline kt_value silu(const kt_parameters *p, floats gate, floats up) {
    floats g = limit_above(gate, p->limit), u = limit_both(up, p->limit), s = sigmoid(g), act = mul_ps(g, s);
    floats slope = mul_ps(s, fmadd_ps(g, sub_ps(set1_ps(1.0f), s), set1_ps(1.0f)));
    return (kt_value){mul_ps(act, u), slope_within(gate, p->limit, 1, mul_ps(slope, u)),
                      slope_within(up, p->limit, 0, act)};
}

/* min(silu(gate), limit) * up, up limited on both sides: Step-3.5. */
TARGET static inline kt_value swiglu_step(const kt_parameters *p, floats gate, floats up) {
    floats u = limit_both(up, p->limit), s = sigmoid(gate), act = mul_ps(gate, s);
    floats slope = mul_ps(s, fmadd_ps(gate, sub_ps(set1_ps(1.0f), s), set1_ps(1.0f)));
    floats limited = limit_above(act, p->limit);
    return (kt_value){mul_ps(limited, u), slope_within(act, p->limit, 1, mul_ps(slope, u)),
                      slope_within(up, p->limit, 0, limited)};
}

/* gate * sigmoid(alpha * gate) * (up + 1), both limited before it: gpt-oss, MiniMax-M3. */
TARGET static inline kt_value swiglu_oai(const kt_parameters *p, floats gate, floats up) {
    const floats one = set1_ps(1.0f);
    floats g = limit_above(gate, p->limit), u = add_ps(limit_both(up, p->limit), one);
    floats scaled = mul_ps(p->alpha, g), s = sigmoid(scaled), act = mul_ps(g, s);
    floats slope = mul_ps(s, fmadd_ps(scaled, sub_ps(one, s), one));
    return (kt_value){mul_ps(act, u), slope_within(gate, p->limit, 1, mul_ps(slope, u)),
                      slope_within(up, p->limit, 0, act)};
}

/* alpha * tanh(gate / alpha) * sigmoid(gate) * beta * tanh(up / beta); beta 0: up as it is. Inkling 2, Kimi-K3. */
TARGET static inline kt_value softcap(const kt_parameters *p, floats gate, floats up) {
    const floats one = set1_ps(1.0f);
    floats a = hyperbolic_tangent(div_ps(gate, p->alpha)), s = sigmoid(gate);
    floats capped = mul_ps(p->alpha, a), act = mul_ps(capped, s), factor = up, factor_slope = one;
    if (p->has_beta) {
        floats b = hyperbolic_tangent(div_ps(up, p->beta));
        factor = mul_ps(p->beta, b);
        factor_slope = sub_ps(one, mul_ps(b, b));
    }
    floats slope = mul_ps(s, fmadd_ps(capped, sub_ps(one, s), sub_ps(one, mul_ps(a, a))));
    return (kt_value){mul_ps(act, factor), mul_ps(slope, factor), mul_ps(act, factor_slope)};
}

/* gate * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 gate^3))) / 2 * up: (1 + tanh(z)) / 2 is sigmoid(2z). */
TARGET static inline kt_value gelu_tanh(const kt_parameters *p, floats gate, floats up) {
    const floats one = set1_ps(1.0f), twice = set1_ps(1.5957691216f), cube = set1_ps(0.044715f);
    floats square = mul_ps(gate, gate), z = mul_ps(mul_ps(twice, gate), fmadd_ps(cube, square, one));
    floats s = sigmoid(z), act = mul_ps(gate, s), z_slope = mul_ps(twice, fmadd_ps(set1_ps(0.134145f), square, one));
    floats slope = fmadd_ps(mul_ps(act, sub_ps(one, s)), z_slope, s);
    (void)p;
    return (kt_value){mul_ps(act, up), mul_ps(slope, up), act};
}

/* gate * (1 + erf(gate / sqrt(2))) / 2 * up. erf: formula 7.1.26 of Abramowitz and Stegun, error at most 1.5e-7. */
TARGET static inline kt_value gelu_erf(const kt_parameters *p, floats gate, floats up) {
    const floats one = set1_ps(1.0f), half = set1_ps(0.5f);
    floats x = mul_ps(without_sign(gate), set1_ps(0.70710678119f));
    floats t = div_ps(one, fmadd_ps(set1_ps(0.3275911f), x, one));
    floats density = kt_exp(negate(mul_ps(x, x))), series = set1_ps(1.061405429f);
    series = fmadd_ps(series, t, set1_ps(-1.453152027f));
    series = fmadd_ps(series, t, set1_ps(1.421413741f));
    series = fmadd_ps(series, t, set1_ps(-0.284496736f));
    series = fmadd_ps(series, t, set1_ps(0.254829592f));
    floats tail = mul_ps(half, mul_ps(mul_ps(series, t), density)); /* the normal distribution below -|gate| */
    floats below = castsi_ps(where_epi32(gt_epi32(castps_si(gate), set1_epi32(-1)), castps_si(sub_ps(one, tail)),
                                         castps_si(tail)));
    floats act = mul_ps(gate, below), slope = fmadd_ps(mul_ps(gate, density), set1_ps(0.39894228040f), below);
    (void)p;
    return (kt_value){mul_ps(act, up), mul_ps(slope, up), act};
}

/* max(gate, 0) * up. */
TARGET static inline kt_value relu(const kt_parameters *p, floats gate, floats up) {
    floats act = max_ps(setzero_ps(), gate);
    (void)p;
    ints slope = where_epi32(gt_epi32(castps_si(gate), set1_epi32(0)), castps_si(up), castps_si(setzero_ps()));
    return (kt_value){mul_ps(act, up), castsi_ps(slope), act};
}
/* max(gate, 0)^2 * up. */
TARGET static inline kt_value relu2(const kt_parameters *p, floats gate, floats up) {
    floats positive = max_ps(setzero_ps(), gate), act = mul_ps(positive, positive);
    (void)p;
    return (kt_value){mul_ps(act, up), mul_ps(mul_ps(set1_ps(2.0f), positive), up), act};
}

/* The kernel of an activation: the value, or where the job wants them only the derivatives, of m rows of 32. */
#define ACTIVATION(name)                                                                                               \
    TARGET void KERNEL_OF(name)(const kt_activation *job) {                                                            \
        const ktq_function *f = job->function;                                                                         \
        const floats one = set1_ps(1.0f);                                                                              \
        const kt_parameters p = {set1_ps(f->limit > 0 ? f->limit : INFINITY), set1_ps(f->alpha), set1_ps(f->beta),     \
                                 f->beta > 0};                                                                         \
        for (int64_t t = 0; t < job->m; t++)                                                                           \
            for (int64_t r = 0, i = t * KT_PANEL_ROWS; r < KT_PANEL_ROWS; r += LANES, i += LANES) {                    \
                kt_value y = name(&p, loadu_ps(job->gate + i), job->up ? loadu_ps(job->up + i) : one);                 \
                if (!job->by_gate) {                                                                                   \
                    storeu_ps(job->out + t * job->out_pitch + r, y.value);                                             \
                    continue;                                                                                          \
                }                                                                                                      \
                storeu_ps(job->by_gate + i, y.by_gate);                                                                \
                if (job->up) storeu_ps(job->by_up + i, y.by_up);                                                       \
            }                                                                                                          \
    }

ACTIVATION(silu)
ACTIVATION(swiglu_step)
ACTIVATION(swiglu_oai)
ACTIVATION(softcap)
ACTIVATION(gelu_tanh)
ACTIVATION(gelu_erf)
ACTIVATION(relu)
ACTIVATION(relu2)

#endif
