/* What every processor can run. */
#include "kernels.h"

unsigned kt_cpu_isas(void) {
    return 1u << KT_ISA_scalar;
}

unsigned kt_cpu_slow_isas(void) {
    return 0;
}
