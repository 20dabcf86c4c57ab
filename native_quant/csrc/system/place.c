#define _GNU_SOURCE /* cpu_set_t, sched_setaffinity, pthread_setaffinity_np */
#include "place.h"

#include "ktq.h"

cpu_set_t kt_place_of(const uint8_t *bits) {
    cpu_set_t place;
    CPU_ZERO(&place);
    for (int cpu = 0; bits && cpu < 8 * KTQ_CPU_BYTES && cpu < CPU_SETSIZE; cpu++)
        if (bits[cpu / 8] >> cpu % 8 & 1) CPU_SET(cpu, &place);
    return place;
}

void kt_send_to(const cpu_set_t *place, pthread_t thread) {
    if (CPU_COUNT(place)) pthread_setaffinity_np(thread, sizeof *place, place);
}

int kt_come_to(const cpu_set_t *place, cpu_set_t *before) {
    cpu_set_t ours;
    if (sched_getaffinity(0, sizeof *before, before) != 0) return 0;
    CPU_AND(&ours, place, before);
    return CPU_COUNT(&ours) && !CPU_EQUAL(&ours, before) && sched_setaffinity(0, sizeof ours, &ours) == 0;
}

void kt_go_back(const cpu_set_t *place, const cpu_set_t *before) {
    cpu_set_t ours, now;
    CPU_AND(&ours, place, before);
    if (sched_getaffinity(0, sizeof now, &now) == 0 && CPU_EQUAL(&now, &ours))
        sched_setaffinity(0, sizeof *before, before);
}
