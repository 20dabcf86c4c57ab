/* Floating-point state and waiting, as far as standard C supports them. */
#ifndef KT_CPU_H
#define KT_CPU_H

#include <fenv.h>

typedef fenv_t kt_fp_state;

/* The floating-point state in which the numerics are defined: round to nearest, subnormals kept. kt_enter returns
   the previous state, kt_leave restores it. */
static inline kt_fp_state kt_enter(void) {
    kt_fp_state before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    return before;
}
/* Standard C cannot flush subnormals to 0, as kt-kernel does: the forward keeps them, and may differ by as much. */
static inline kt_fp_state kt_enter_forward(void) {
    return kt_enter();
}
static inline void kt_leave(kt_fp_state before) {
    fesetenv(&before);
}

/* Pauses in a loop that waits for another thread. */
static inline void kt_pause(void) {
}

#endif
