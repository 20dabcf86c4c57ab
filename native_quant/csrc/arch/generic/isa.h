/* The instruction sets of a processor for which there are no kernels of its own: scalar C and nothing else. */
#ifndef KT_ISA_H
#define KT_ISA_H

/* Worst first, each with the one that it contains. */
#define KT_ISAS(X) X(scalar, scalar)

#endif
