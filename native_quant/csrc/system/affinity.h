/* CPU affinity of the runtime's threads. An empty set means that a thread is not pinned. */
#ifndef KT_AFFINITY_H
#define KT_AFFINITY_H

#include <pthread.h>
#include <sched.h>
#include <stdint.h>

/* Returns the set for KTQ_CPU_BYTES bytes of bits; NULL: an empty set. */
cpu_set_t kt_read_cpus(const uint8_t *bits);

/* Pins a new thread. Best effort: a container may forbid it. */
void kt_pin_thread(const cpu_set_t *cpus, pthread_t thread);

/* Pins the calling thread to those of `cpus` on which it is allowed to run now (something else may have restricted it:
   taskset, a cpuset, a CPU that went offline). Returns 1 if its CPUs changed. *before: its CPUs before. */
int kt_pin_caller(const cpu_set_t *cpus, cpu_set_t *before);

/* Undoes kt_pin_caller, unless something else has changed the calling thread's CPUs since. */
void kt_unpin_caller(const cpu_set_t *cpus, const cpu_set_t *before);

#endif
