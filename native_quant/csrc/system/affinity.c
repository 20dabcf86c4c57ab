#define _GNU_SOURCE /* cpu_set_t, sched_setaffinity, pthread_setaffinity_np */
#include "affinity.h"

#include "ktq.h"

cpu_set_t kt_read_cpus(const uint8_t *bits) {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    for (int cpu = 0; bits && cpu < 8 * KTQ_CPU_BYTES && cpu < CPU_SETSIZE; cpu++)
        if (bits[cpu / 8] >> cpu % 8 & 1) CPU_SET(cpu, &cpus);
    return cpus;
}

void kt_pin_thread(const cpu_set_t *cpus, pthread_t thread) {
    if (CPU_COUNT(cpus)) pthread_setaffinity_np(thread, sizeof *cpus, cpus);
}

int kt_pin_caller(const cpu_set_t *cpus, cpu_set_t *before) {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof *before, before) != 0) return 0;
    CPU_AND(&allowed, cpus, before);
    return CPU_COUNT(&allowed) && !CPU_EQUAL(&allowed, before) && sched_setaffinity(0, sizeof allowed, &allowed) == 0;
}

void kt_unpin_caller(const cpu_set_t *cpus, const cpu_set_t *before) {
    cpu_set_t allowed, current;
    CPU_AND(&allowed, cpus, before);
    if (sched_getaffinity(0, sizeof current, &current) == 0 && CPU_EQUAL(&current, &allowed))
        sched_setaffinity(0, sizeof *before, before);
}
