/* The CPUs of the runtime's threads. */
#ifndef KT_PLACE_H
#define KT_PLACE_H

#include <pthread.h>
#include <sched.h>
#include <stdint.h>

/* The CPUs that a thread is meant for; none: wherever it is. */
cpu_set_t kt_place_of(const uint8_t *bits);

/* Of a thread that was just started. Best effort: a container may forbid it. */
void kt_send_to(const cpu_set_t *place, pthread_t thread);

/* The calling thread from now on runs on those CPUs of its place where it may run at all: whoever took others from it
   (taskset, a cpuset, a CPU that went off) is obeyed. Returns 1 if that changed anything; *before: what it was. */
int kt_come_to(const cpu_set_t *place, cpu_set_t *before);

/* Undoes kt_come_to, unless somebody else has changed the calling thread's CPUs since. */
void kt_go_back(const cpu_set_t *place, const cpu_set_t *before);

#endif
