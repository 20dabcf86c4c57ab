/* Forwards and copies in the background: one thread for each pool runs the submitted jobs in their order. */
#include <pthread.h>
#include <stdlib.h>

#include "pool.h"

enum { SPINS = 1000 };

struct ktq_job {
    ktq_pool *pool;
    ktq_moe moe;
    ktq_call call;
    int64_t count;                  /* number of rectangles */
    const ktq_rectangle *rectangle; /* NULL: the job is a forward */
    kt_queue *queue;
    ktq_job *next;
    int result;
    atomic_uint pending; /* 0: not pending; else 1 + kt_fork_epoch() at submission */
};

/* Whether the job is queued or running. In a forked child of the process that submitted it, it never runs. */
static int is_pending(ktq_job *job) {
    unsigned since = atomic_load(&job->pending);
    if (since == 0 || since == 1 + kt_fork_epoch()) return since != 0;
    job->result = KTQ_EFORK;
    atomic_compare_exchange_strong(&job->pending, &since, 0);
    return 0;
}

static int run(const ktq_job *job) {
    if (job->rectangle) return ktq_copy_rows(job->pool, job->count, job->rectangle);
    return ktq_forward(job->pool, &job->moe, &job->call);
}

static void *serve(void *argument) {
    kt_queue *queue = argument;
    pthread_mutex_lock(&queue->lock);
    for (;;) {
        while (!queue->first && !queue->stop) pthread_cond_wait(&queue->submitted, &queue->lock);
        if (!queue->first) break;
        ktq_job *job = queue->first;
        queue->first = job->next;
        pthread_mutex_unlock(&queue->lock);
        job->result = run(job);
        pthread_mutex_lock(&queue->lock);
        atomic_store(&job->pending, 0);
        pthread_cond_broadcast(&queue->finished);
    }
    pthread_mutex_unlock(&queue->lock);
    return NULL;
}

static int new_job(ktq_job values, ktq_job **out) {
    ktq_job *job = malloc(sizeof *job);
    if (!job) return KTQ_ENOMEM;
    *job = values;
    *out = job;
    return KTQ_OK;
}

int ktq_job_new(ktq_pool *pool, const ktq_moe *moe, const ktq_call *call, ktq_job **out) {
    if (!pool || !moe || !call || !out) return KTQ_EINVAL;
    return new_job((ktq_job){.pool = pool, .moe = *moe, .call = *call}, out);
}

int ktq_copy_job_new(ktq_pool *pool, int64_t count, const ktq_rectangle *rectangle, ktq_job **out) {
    if (!pool || !rectangle || !out) return KTQ_EINVAL;
    return new_job((ktq_job){.pool = pool, .count = count, .rectangle = rectangle}, out);
}

void ktq_job_submit(void *argument) {
    ktq_job *job = argument;
    ktq_job_wait(job); /* an earlier run uses the same buffers */
    kt_queue *queue = kt_start_queue(job->pool, serve);
    if (queue) {
        pthread_mutex_lock(&queue->lock);
        while (is_pending(job))
            pthread_cond_wait(&queue->finished, &queue->lock); /* another thread has submitted it meanwhile */
        if (!queue->stop) {
            job->queue = queue;
            job->next = NULL;
            atomic_store(&job->pending, 1 + kt_fork_epoch());
            ktq_job **last = &queue->first;
            while (*last) last = &(*last)->next;
            *last = job;
            pthread_cond_signal(&queue->submitted);
            pthread_mutex_unlock(&queue->lock);
            return;
        }
        pthread_mutex_unlock(&queue->lock);
    }
    job->result = run(job); /* no thread can be started: run it now */
}

void ktq_job_wait(void *argument) {
    ktq_job *job = argument;
    for (int spin = 0; spin < SPINS && is_pending(job); spin++) kt_pause();
    if (!is_pending(job)) return;
    pthread_mutex_lock(&job->queue->lock);
    while (is_pending(job)) pthread_cond_wait(&job->queue->finished, &job->queue->lock);
    pthread_mutex_unlock(&job->queue->lock);
}

int ktq_job_result(const ktq_job *job) {
    return job ? job->result : KTQ_EINVAL;
}

void ktq_job_free(ktq_job *job) {
    if (job) ktq_job_wait(job);
    free(job);
}
