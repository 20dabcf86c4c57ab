/* How the processor reads weights fastest (docs/explanation/kernels.md). Set when the library is loaded, by arch/. */
#ifndef KT_READING_H
#define KT_READING_H

/* in_order      codes of INT4 and INT8 for few tokens are read in the order of their bytes
   in_turn       codes are prefetched into L1, lines of two panels in turn; 0: into L2, or only by the processor itself
   far           also those behind them into L2, if products take much less time than reads
   long_units    units of integers have more columns, and lines of Q8_0 are prefetched in turn, too. Otherwise, its
                 units are so short that two pages are read at once anyway
   scales_in_l1  scales of Q4_K, Q5_K and Q6_K are prefetched into L1; 0: into L2 */
typedef struct {
    int in_order, in_turn, far, long_units, scales_in_l1;
} kt_reading;
extern kt_reading kt_reads;

#endif
