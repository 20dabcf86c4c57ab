/* Threads that wait for a job: they spin for some microseconds after the last job, then sleep on a futex.
 *
 *     caller                                       thread
 *     job, open = epoch = e; wake the sleepers     until epoch != seen: pause, later sleep
 *     work                                         inside += 1; if open: work; inside -= 1
 *     open = 0; until inside == 0: pause
 *
 * A late thread finds open == 0 and touches nothing, so the caller never waits for a sleeping thread. */
#define _GNU_SOURCE /* sched_getcpu, syscall */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "affinity.h"
#include "pool.h"

enum {
    SPINS = 1000, /* pauses before a thread sleeps: 10 to 50 microseconds */
    HUGE_PAGE = 2 << 20,
};

typedef struct {
    ktq_pool *pool;
    pthread_t thread;
    int group;
    cpu_set_t cpus;
} worker;

struct ktq_pool {
    int groups, workers;
    worker *worker;

    pthread_mutex_t busy; /* held from kt_pool_enter to kt_pool_leave */
    int caller_is_pinned;
    cpu_set_t caller_cpus;  /* CPUs of the caller before it was pinned */
    atomic_uint fork_epoch; /* value of the global fork_epoch when the threads were started */
    int running;            /* threads that exist, without the caller */
    int closing;            /* accepts no more jobs; guarded by `starting` */
    int closed;             /* runs no more jobs; guarded by `busy` */

    kt_work_fn *work;
    void *job;
    _Alignas(64) atomic_uint epoch; /* the futex */
    atomic_uint open;
    atomic_int sleepers, stop;
    _Alignas(64) atomic_int inside;

    void *memory;
    size_t memory_size;

    kt_queue queue;
    unsigned queue_fork_epoch;
};

/* Number of forks since the library was loaded. Threads do not survive a fork. */
static unsigned fork_epoch;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Held while the threads of a child or of a queue are started. A child initializes it again, in case that another
 * thread held it during the fork. */
static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;

static void count_fork(void) {
    fork_epoch++;
    pthread_mutex_init(&starting, NULL);
}

static void watch_forks(void) {
    pthread_atfork(NULL, NULL, count_fork);
}

static void futex(atomic_uint *word, int operation, unsigned value) {
    syscall(SYS_futex, word, operation | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

static unsigned wait_for_epoch(ktq_pool *pool, unsigned seen) {
    unsigned epoch;
    for (int spin = 0; (epoch = atomic_load_explicit(&pool->epoch, memory_order_acquire)) == seen; spin++) {
        if (spin < SPINS) {
            kt_pause();
            continue;
        }
        atomic_fetch_add(&pool->sleepers, 1);
        futex(&pool->epoch, FUTEX_WAIT, seen);
        atomic_fetch_sub(&pool->sleepers, 1);
    }
    return epoch;
}

static void *run_thread(void *argument) {
    worker *self = argument;
    ktq_pool *pool = self->pool;
    cpu_set_t before;
    for (unsigned seen = 0;;) {
        seen = wait_for_epoch(pool, seen);
        if (atomic_load(&pool->stop)) return NULL;
        atomic_fetch_add(&pool->inside, 1);
        if (atomic_load(&pool->open)) pool->work(pool->job, self->group, (int)(self - pool->worker));
        atomic_fetch_sub(&pool->inside, 1);
        kt_pin_caller(&self->cpus, &before); /* after `inside`: the caller does not wait for it */
    }
}

static void stop_threads(ktq_pool *pool) {
    atomic_store(&pool->stop, 1);
    atomic_fetch_add(&pool->epoch, 1);
    futex(&pool->epoch, FUTEX_WAKE, INT_MAX);
    for (int i = 1; i <= pool->running; i++) pthread_join(pool->worker[i].thread, NULL);
    pool->running = 0;
    atomic_store(&pool->stop, 0);
}

static int start_thread(pthread_t *thread, void *(*run)(void *), void *argument) {
    /* The thread handles only signals that its own faults raise; all others go to the caller's threads. */
    static const int faults[] = {SIGBUS, SIGSEGV, SIGILL, SIGFPE, SIGTRAP};
    sigset_t blocked, before;
    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) sigdelset(&blocked, faults[i]);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    int error = pthread_create(thread, NULL, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

static int start_threads(ktq_pool *pool) {
    atomic_store(&pool->epoch, 0);
    atomic_store(&pool->open, 0);
    atomic_store(&pool->sleepers, 0);
    atomic_store(&pool->inside, 0);
    pool->running = 0;
    for (int i = 1; i < pool->workers; i++) {
        worker *worker = &pool->worker[i];
        if (start_thread(&worker->thread, run_thread, worker) != 0) {
            stop_threads(pool);
            return KTQ_ESYSTEM;
        }
        pool->running = i;
        kt_pin_thread(&worker->cpus, worker->thread);
    }
    atomic_store(&pool->fork_epoch, fork_epoch); /* last, because a thread that sees it may lock `busy` */
    return KTQ_OK;
}

/* In a forked child, a thread of the parent may have held `busy`. Only one of the callers may initialize it again. */
static int start_after_fork(ktq_pool *pool) {
    int error = KTQ_OK;
    pthread_mutex_lock(&starting);
    if (pool->closing) {
        error = KTQ_ECLOSED;
    } else if (atomic_load(&pool->fork_epoch) != fork_epoch) {
        pthread_mutex_init(&pool->busy, NULL);
        error = start_threads(pool);
    }
    pthread_mutex_unlock(&starting);
    return error;
}

static void stop_queue(kt_queue *queue) {
    pthread_mutex_lock(&queue->lock);
    queue->stop = 1;
    pthread_cond_signal(&queue->submitted);
    pthread_mutex_unlock(&queue->lock);
    pthread_join(queue->thread, NULL);
}

int ktq_pool_new(int groups, const int *threads, const uint8_t *cpus, ktq_pool **out) {
    if (groups < 1 || groups > KTQ_POOL_THREADS || !threads || !out) return KTQ_EINVAL;
    int workers = 0;
    for (int g = 0; g < groups; g++) {
        if (threads[g] < 1 || threads[g] > KTQ_POOL_THREADS - workers) return KTQ_EINVAL;
        workers += threads[g];
    }
    ktq_pool *pool = aligned_alloc(64, (sizeof *pool + 63) / 64 * 64);
    worker *new_workers = calloc((size_t)workers, sizeof *new_workers);
    if (!pool || !new_workers) {
        free(pool);
        free(new_workers);
        return KTQ_ENOMEM;
    }
    memset(pool, 0, sizeof *pool);
    *pool = (ktq_pool){.groups = groups, .workers = workers, .worker = new_workers};
    pthread_mutex_init(&pool->busy, NULL);
    for (int g = 0, i = 0; g < groups; g++)
        for (int j = 0; j < threads[g]; j++, i++) {
            const uint8_t *bits = cpus ? cpus + (size_t)i * KTQ_CPU_BYTES : NULL;
            new_workers[i] = (worker){.pool = pool, .group = g, .cpus = kt_read_cpus(bits)};
        }
    pthread_once(&once, watch_forks);
    int error = start_threads(pool);
    if (error) {
        free(new_workers);
        free(pool);
        return error;
    }
    *out = pool;
    return KTQ_OK;
}

void ktq_pool_close(ktq_pool *pool) {
    pthread_mutex_lock(&starting);
    int was_closing = pool->closing, has_queue = pool->queue.started && pool->queue_fork_epoch == fork_epoch;
    pool->closing = 1;
    pthread_mutex_unlock(&starting);
    if (was_closing) return;
    if (has_queue) stop_queue(&pool->queue);
    if (atomic_load(&pool->fork_epoch) != fork_epoch) return;
    pthread_mutex_lock(&pool->busy);
    pool->closed = 1;
    stop_threads(pool);
    pthread_mutex_unlock(&pool->busy);
}

void ktq_pool_free(ktq_pool *pool) {
    if (!pool) return;
    ktq_pool_close(pool);
    if (pool->memory) munmap(pool->memory, pool->memory_size);
    free(pool->worker);
    free(pool);
}

kt_queue *kt_start_queue(ktq_pool *pool, void *(*serve)(void *)) {
    kt_queue *queue = &pool->queue;
    pthread_mutex_lock(&starting);
    if (!pool->closing && (!queue->started || pool->queue_fork_epoch != fork_epoch)) {
        *queue = (kt_queue){.started = 0};
        pthread_mutex_init(&queue->lock, NULL);
        pthread_cond_init(&queue->submitted, NULL);
        pthread_cond_init(&queue->finished, NULL);
        pool->queue_fork_epoch = fork_epoch;
        queue->started = start_thread(&queue->thread, serve, queue) == 0;
        if (queue->started) kt_pin_thread(&pool->worker[0].cpus, queue->thread);
    }
    int is_usable = queue->started && !pool->closing;
    pthread_mutex_unlock(&starting);
    return is_usable ? queue : NULL;
}

unsigned kt_fork_epoch(void) {
    return fork_epoch;
}

int kt_pool_groups(const ktq_pool *pool) {
    return pool->groups;
}

int kt_pool_workers(const ktq_pool *pool) {
    return pool->workers;
}

int kt_pool_enter(ktq_pool *pool) {
    if (atomic_load(&pool->fork_epoch) != fork_epoch) {
        int error = start_after_fork(pool);
        if (error) return error;
    }
    pthread_mutex_lock(&pool->busy);
    if (pool->closed) {
        pthread_mutex_unlock(&pool->busy);
        return KTQ_ECLOSED;
    }
    const cpu_set_t *cpus = &pool->worker[0].cpus;
    int cpu = sched_getcpu();
    pool->caller_is_pinned = !(cpu >= 0 && CPU_ISSET(cpu, cpus)) && kt_pin_caller(cpus, &pool->caller_cpus);
    return KTQ_OK;
}

void kt_pool_leave(ktq_pool *pool) {
    if (pool->caller_is_pinned) kt_unpin_caller(&pool->worker[0].cpus, &pool->caller_cpus);
    pthread_mutex_unlock(&pool->busy);
}

void kt_pool_run(ktq_pool *pool, kt_work_fn *work, void *job) {
    pool->work = work;
    pool->job = job;
    atomic_store(&pool->open, 1);
    atomic_fetch_add(&pool->epoch, 1);
    if (atomic_load(&pool->sleepers)) futex(&pool->epoch, FUTEX_WAKE, INT_MAX);
    work(job, pool->worker[0].group, 0);
    atomic_store(&pool->open, 0);
    for (int spin = 0; atomic_load(&pool->inside); spin++) {
        if (spin < SPINS) kt_pause();
        else sched_yield();
    }
}

void *kt_pool_memory(ktq_pool *pool, size_t size, size_t keep) {
    if (size <= pool->memory_size) return pool->memory;
    size = (size + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    void *block = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED) return NULL;
    madvise(block, size, MADV_HUGEPAGE);
    void *old = pool->memory;
    size_t old_size = pool->memory_size;
    if (keep) memcpy(block, old, keep);
    pool->memory = block; /* before the old memory is unmapped, because another thread may fork */
    pool->memory_size = size;
    if (old) munmap(old, old_size);
    return block;
}
