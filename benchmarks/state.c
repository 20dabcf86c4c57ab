/* Whether a core is quiet: on a shared machine a neighbour on its other hyperthread takes up to half of it, for
 * microseconds or minutes. Registers only, so that no cache is touched. Built by state.py.
 *
 * A round of `wide` fills all slots in which a core starts instructions, with multiplications of vectors and additions,
 * so that whatever runs beside it takes some of them. A round of `chain` is one instruction after the other, which a
 * neighbour hardly slows down: it says how fast the clock is. Their quotient is the state, whatever the clock. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

enum { PARTS = 3, WIDE_NS = 8000, CHAIN_NS = 3000 }; /* of a probe: PARTS times both */

static double nanoseconds(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

#if defined(__AVX2__)
#define SLOTS(v, a, b) "vpmaddwd %%ymm" #v ", %%ymm" #v ", %%ymm" #v "\n\tadd $1, %%" #a "\n\tadd $1, %%" #b "\n\t"
static void wide(long rounds) {
    for (; rounds; rounds--)
        __asm__ volatile(SLOTS(0, rax, rcx) SLOTS(1, rdx, rsi) SLOTS(2, r8, r9) SLOTS(3, r10, r11)
                         SLOTS(4, rax, rcx) SLOTS(5, rdx, rsi) SLOTS(6, r8, r9) SLOTS(7, r10, r11)
                         SLOTS(8, rax, rcx) SLOTS(9, rdx, rsi) SLOTS(10, r8, r9) SLOTS(11, r10, r11)
                         : : : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",
                           "xmm10", "xmm11", "rax", "rcx", "rdx", "rsi", "r8", "r9", "r10", "r11", "cc");
}
static void chain(long rounds) {
    for (; rounds; rounds--)
        __asm__ volatile("vpmaddwd %%ymm0, %%ymm0, %%ymm0\n\tvpmaddwd %%ymm0, %%ymm0, %%ymm0" : : : "xmm0");
}
#else
static void wide(long rounds) {
    uint64_t x[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    for (; rounds; rounds--)
        for (int i = 0; i < 32; i++) {
            x[i % 8] += 3;
            __asm__ volatile("" : "+r"(x[i % 8]));
        }
}
static void chain(long rounds) {
    for (uint64_t x = 3; rounds; rounds--)
        for (int i = 0; i < 3; i++) {
            x *= x;
            __asm__ volatile("" : "+r"(x));
        }
}
#endif

static long wide_rounds, chain_rounds;

/* How many rounds take about so many nanoseconds. */
static long rounds_for(void (*loop)(long), double wanted) {
    double best = 1e18;
    for (int i = 0; i < 100; i++) {
        double ns = nanoseconds(CLOCK_MONOTONIC);
        loop(1000);
        ns = nanoseconds(CLOCK_MONOTONIC) - ns;
        if (ns < best) best = ns;
    }
    return (long)(1000 * wanted / best) + 1;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The state of the core that this runs on: the smaller the quieter. Of `wide` the median counts, so that one interrupt
 * changes nothing; of `chain` the shortest, since a neighbour can only make it longer. */
static double measure(void) {
    double wides[PARTS], shortest = 1e18;
    for (int i = 0; i < PARTS; i++) {
        double start = nanoseconds(CLOCK_MONOTONIC);
        chain(chain_rounds);
        double middle = nanoseconds(CLOCK_MONOTONIC);
        wide(wide_rounds);
        wides[i] = nanoseconds(CLOCK_MONOTONIC) - middle;
        if (middle - start < shortest) shortest = middle - start;
    }
    qsort(wides, PARTS, sizeof *wides, ascending);
    return (wides[PARTS / 2] / (double)wide_rounds) / (shortest / (double)chain_rounds);
}

/* A thread for each core that the caller does not run on. */
typedef struct {
    sem_t go;
    int cpu, pinned;
    double state, cpu_ns;
} helper;

static helper *helpers;
static int helper_count;
static atomic_int left;
static sem_t finished;

static void wait_for(sem_t *semaphore) {
    while (sem_wait(semaphore) != 0 && errno == EINTR) {}
}

static void *help(void *argument) {
    helper *self = argument;
    struct sched_param first = {.sched_priority = 1};
    sched_setscheduler(0, SCHED_FIFO, &first); /* where allowed: at once, also on a core on which another one spins */
    for (;;) {
        wait_for(&self->go);
        if (self->pinned != self->cpu) {
            cpu_set_t set;
            CPU_ZERO(&set);
            CPU_SET(self->cpu, &set);
            sched_setaffinity(0, sizeof set, &set);
            self->pinned = self->cpu;
        }
        self->state = measure();
        self->cpu_ns = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
        if (atomic_fetch_sub(&left, 1) == 1) sem_post(&finished);
    }
    return NULL;
}

/* Starts `count` helpers. Returns 0, or -1 where the system refuses. */
int state_start(int count) {
    wide_rounds = rounds_for(wide, WIDE_NS);
    chain_rounds = rounds_for(chain, CHAIN_NS);
    sem_init(&finished, 0, 0);
    helpers = calloc((size_t)count, sizeof *helpers);
    if (!helpers && count) return -1;
    for (; helper_count < count; helper_count++) {
        pthread_t thread;
        helper *one = &helpers[helper_count];
        one->pinned = -1;
        sem_init(&one->go, 0, 0);
        if (pthread_create(&thread, NULL, help, one) != 0) return -1;
        pthread_detach(thread);
    }
    return 0;
}

/* The states of these cores at the same time; cpus[0] < 0: that of the caller's, by the caller itself. */
void state_probe(int count, const int *cpus, double *states) {
    int own = cpus[0] < 0;
    atomic_store(&left, count - own);
    for (int i = own; i < count; i++) {
        helpers[i - own].cpu = cpus[i];
        sem_post(&helpers[i - own].go);
    }
    if (own) states[0] = measure();
    if (count > own) {
        int tries = own ? 2000 : 0; /* as long as a probe takes: others began a little later */
        while (tries && sem_trywait(&finished) != 0) tries--;
        if (!tries) wait_for(&finished);
    }
    for (int i = own; i < count; i++) states[i] = helpers[i - own].state;
}

/* Seconds of CPU that the helpers have used. */
double state_cpu(void) {
    double all = 0;
    for (int i = 0; i < helper_count; i++) all += helpers[i].cpu_ns;
    return all / 1e9;
}
