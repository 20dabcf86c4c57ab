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

/* Takes the pool for one job at a time, and starts its threads in a child made by fork(). KTQ_ESYSTEM: they cannot be
   started, which is tried again next time; KTQ_ECLOSED. */
int kt_pool_enter(ktq_pool *pool);
void kt_pool_leave(ktq_pool *pool);

/* Between enter and leave: work(job, ...) in every thread that is awake in time, the caller among them; returns when
   none is in it any more. A thread may join late or never: those present must be able to finish the job. */
void kt_pool_run(ktq_pool *pool, kt_work_fn *work, void *job);

/* Between enter and leave: a block of at least `size` bytes, on a boundary of 64, that is kept between jobs. If it has
   to move, its first `keep` bytes move with it. NULL: no memory. */
void *kt_pool_block(ktq_pool *pool, size_t size, size_t keep);

/* Number of forks between the process that loaded the library and this one. */
unsigned kt_pool_forks(void);

/* The submitted jobs of a pool and the thread that takes them (job.c). */
typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t submitted, finished;
    ktq_job *first;
    int started, stop;
    pthread_t thread;
} kt_queue;
/* Starts the thread if it is not there (or was left behind by fork()); NULL: the system refused, or the pool is being
 * closed. */
kt_queue *kt_pool_queue(ktq_pool *pool, void *(*serve)(void *));

#endif
