/* The kernel of each activation. */
#include "kernels.h"

kt_activation_fn *kt_activation_of(const kt_kernels *kernels, int activation) {
    switch (activation) {
    case KTQ_SILU: return kernels->silu;
    case KTQ_SWIGLU_STEP: return kernels->swiglu_step;
    case KTQ_SWIGLU_OAI: return kernels->swiglu_oai;
    case KTQ_SOFTCAP: return kernels->softcap;
    case KTQ_GELU_TANH: return kernels->gelu_tanh;
    case KTQ_GELU_ERF: return kernels->gelu_erf;
    case KTQ_RELU: return kernels->relu;
    case KTQ_RELU2: return kernels->relu2;
    }
    return NULL;
}
