/* The processor, x86-64: floating-point state, the pause of a waiting thread, and the size of a cache. */
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

/* How this processor reads weights fastest. Set when the library is loaded.
     in_order   codes of INT4 and INT8 for few tokens: in the order of their bytes
     in_turn    codes are prefetched into L1, lines of two panels in turn; 0: into L2, or only by the processor itself
     far        also those behind them into L2, if products take much less time than reads
     long_units  units of integers have more columns, and lines of Q8_0 are prefetched in turn, too
     scales_in_l1  scales of Q4_K, Q5_K and Q6_K are prefetched into L1; 0: into L2 */
typedef struct {
    int in_order, in_turn, far, long_units, scales_in_l1;
} kt_reading;
extern kt_reading kt_reads;

#endif
