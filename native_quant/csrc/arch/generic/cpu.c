/* The instruction sets of a processor without kernels of its own: only scalar. */
#include "kernels.h"
#include "reading.h"

kt_reading kt_reads; /* nothing is prefetched */

unsigned kt_cpu_isas(void) {
    return 1u << KT_ISA_scalar;
}

unsigned kt_cpu_slow_isas(void) {
    return 0;
}
