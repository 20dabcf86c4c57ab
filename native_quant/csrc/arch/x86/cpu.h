/* The processor, x86-64: floating-point state, and the pause of a waiting thread. */
#ifndef KT_CPU_H
#define KT_CPU_H

/* MXCSR (Intel SDM volume 1, 10.2.3): all exceptions masked, round to nearest; with FTZ and DAZ, subnormals are 0. */
enum { KT_MXCSR = 0x1f80, KT_MXCSR_FORWARD = 0x9fc0 };

typedef unsigned kt_fp_state;

/* The floating-point state in which the numerics are defined: round to nearest, subnormals kept. Some libraries switch
   FTZ/DAZ on for the whole process when they are loaded. kt_enter returns the previous state, kt_leave restores it. */
static inline kt_fp_state kt_enter(void) {
    kt_fp_state before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(KT_MXCSR);
    return before;
}
/* Sets the state of the forward: as in kt-kernel, subnormals are 0 (FTZ and DAZ). */
static inline kt_fp_state kt_enter_forward(void) {
    kt_fp_state before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(KT_MXCSR_FORWARD);
    return before;
}
static inline void kt_leave(kt_fp_state before) {
    __builtin_ia32_ldmxcsr(before);
}

/* Pauses in a loop that waits for another thread. */
static inline void kt_pause(void) {
    __builtin_ia32_pause();
}

#endif
