/* The runtime's threads. */
#ifndef KT_POOL_H
#define KT_POOL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

#include "cpu.h"
#include "ktq.h"

/* The function that every thread of a pool runs once per job; worker 0 is the caller. */
typedef void kt_work_fn(void *job, int group, int worker);

int kt_pool_groups(const ktq_pool *pool);
int kt_pool_workers(const ktq_pool *pool);

/* Locks the pool for one job, and starts its threads in a child made by fork(). KTQ_ESYSTEM: the threads cannot be
   started (the next call tries again). KTQ_ECLOSED: the pool is closed. */
int kt_pool_enter(ktq_pool *pool);
void kt_pool_leave(ktq_pool *pool);

/* Runs work(job, ...) in the caller and in every thread that wakes up in time, and returns when all of them are done.
   Call it between enter and leave. A thread may join late or never, so any number of threads must be able to finish the
   job. */
void kt_pool_run(ktq_pool *pool, kt_work_fn *work, void *job);

/* Returns the pool's memory, at least `size` bytes on a boundary of 64, which stays allocated between jobs. Call it
   between enter and leave. If the memory has to move, its first `keep` bytes move with it. NULL: out of memory. */
void *kt_pool_memory(ktq_pool *pool, size_t size, size_t keep);

/* Number of forks between the process that loaded the library and this one. */
unsigned kt_fork_epoch(void);

/* The submitted jobs of a pool and the thread that takes them (job.c). */
typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t submitted, finished;
    ktq_job *first;
    int started, stop;
    pthread_t thread;
} kt_queue;
/* Returns the pool's queue, after starting its thread if it is not running (as in a forked child). NULL: the system
 * refused, or the pool is being closed. */
kt_queue *kt_start_queue(ktq_pool *pool, void *(*serve)(void *));

#endif
