/* At 4 to 64 KiB threads are as fast as AIO at twice the CPU. On tmpfs a small block takes less time
 * than waking a thread for it, so a thread takes several at once. */
#define _GNU_SOURCE
#include "workers.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* What a thread takes at once: no more than its share of what waits, nor than a large block. */
enum { TAKE_LIMIT = 16, TAKE_NBYTES = 262144 };

struct worker {
    struct workers *workers;
    uint32_t number;
    pthread_t thread;
};

struct workers {
    int wake_fd;
    int completion_fd; /* readable while `done` is not empty */
    workers_move *move;
    void *context;
    uint32_t thread_count;
    struct worker *threads;
    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t work;
    bool stopping;
    uint32_t idle_count;
    uint32_t waiting_count;
    struct op_queue waiting;
    struct op_queue done;
};

void move_by_kernel(struct backend_op *op)
{
    int vector_count = (int)op->vector_count;
    ssize_t moved = op->direction == NVS_READ
                        ? preadv(op->fd, op->vectors, vector_count, (off_t)op->offset_bytes)
                        : pwritev(op->fd, op->vectors, vector_count, (off_t)op->offset_bytes);
    op->result = moved < 0 ? -errno : moved;
}

/* Under the lock. */
static uint32_t take_work(struct workers *workers, struct backend_op **ops)
{
    uint32_t share = (workers->waiting_count + workers->thread_count - 1) / workers->thread_count;
    uint32_t count = 0;
    uint64_t nbytes = 0;
    while (count < share && count < TAKE_LIMIT && nbytes < TAKE_NBYTES
           && (ops[count] = op_queue_pop(&workers->waiting)))
        nbytes += ops[count++]->nbytes;
    workers->waiting_count -= count;
    return count;
}

static void *worker_thread(void *argument)
{
    struct worker *worker = argument;
    struct workers *workers = worker->workers;
    struct backend_op *ops[TAKE_LIMIT];
    pthread_mutex_lock(&workers->lock);
    for (;;) {
        workers->idle_count++;
        while (!workers->waiting.head && !workers->stopping)
            pthread_cond_wait(&workers->work, &workers->lock);
        workers->idle_count--;
        uint32_t count = take_work(workers, ops);
        if (count == 0)
            break;
        pthread_mutex_unlock(&workers->lock);
        for (uint32_t i = 0; i < count; i++)
            workers->move(workers->context, worker->number, ops[i]);
        pthread_mutex_lock(&workers->lock);
        if (!workers->done.head)
            eventfd_write(workers->completion_fd, 1);
        for (uint32_t i = 0; i < count; i++)
            op_queue_push(&workers->done, ops[i]);
    }
    pthread_mutex_unlock(&workers->lock);
    return NULL;
}

static int start_worker(struct workers *workers, const char *name)
{
    struct worker *worker = &workers->threads[workers->thread_count];
    worker->workers = workers;
    worker->number = workers->thread_count;
    int rc = -pthread_create(&worker->thread, NULL, worker_thread, worker);
    if (rc == 0) {
        pthread_setname_np(worker->thread, name);
        workers->thread_count++;
    }
    return rc;
}

int workers_open(struct workers **made, struct backend_options *options, const char *name,
                 workers_move *move, void *context)
{
    struct workers *workers = calloc(1, sizeof *workers);
    if (!workers)
        return -ENOMEM;
    workers->wake_fd = options->wake_fd;
    workers->move = move;
    workers->context = context;
    pthread_mutex_init(&workers->lock, NULL);
    pthread_cond_init(&workers->work, NULL);
    op_queue_init(&workers->waiting);
    op_queue_init(&workers->done);
    workers->completion_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    workers->threads = calloc(options->thread_count, sizeof *workers->threads);
    int rc = workers->completion_fd < 0 ? -errno : !workers->threads ? -ENOMEM : 0;
    while (rc == 0 && workers->thread_count < options->thread_count)
        rc = start_worker(workers, name);
    if (rc < 0) {
        snprintf(options->reason, options->reason_nbytes, "starting threads: %s", strerror(-rc));
        workers_close(workers);
        return rc;
    }
    *made = workers;
    return 0;
}

int workers_submit(void *state, struct backend_op **ops, uint32_t count)
{
    struct workers *workers = state;
    pthread_mutex_lock(&workers->lock);
    for (uint32_t i = 0; i < count; i++)
        op_queue_push(&workers->waiting, ops[i]);
    workers->waiting_count += count;
    for (uint32_t i = 0; i < count && i < workers->idle_count; i++)
        pthread_cond_signal(&workers->work);
    pthread_mutex_unlock(&workers->lock);
    return (int)count;
}

static int take_done(struct workers *workers, struct backend_op **done, uint32_t capacity)
{
    uint32_t count = 0;
    pthread_mutex_lock(&workers->lock);
    while (count < capacity && (done[count] = op_queue_pop(&workers->done)))
        count++;
    eventfd_t ignored;
    if (count > 0 && !workers->done.head)
        eventfd_read(workers->completion_fd, &ignored);
    pthread_mutex_unlock(&workers->lock);
    return (int)count;
}

int workers_reap(void *state, struct backend_op **done, uint32_t capacity, int64_t timeout_ns)
{
    struct workers *workers = state;
    int count = take_done(workers, done, capacity);
    if (count != 0 || timeout_ns == 0)
        return count;
    wait_readable(workers->completion_fd, workers->wake_fd, timeout_ns);
    return take_done(workers, done, capacity);
}

void workers_close(void *state)
{
    struct workers *workers = state;
    pthread_mutex_lock(&workers->lock);
    workers->stopping = true;
    pthread_cond_broadcast(&workers->work);
    pthread_mutex_unlock(&workers->lock);
    for (uint32_t i = 0; i < workers->thread_count; i++)
        pthread_join(workers->threads[i].thread, NULL);
    if (workers->completion_fd >= 0)
        close(workers->completion_fd);
    pthread_cond_destroy(&workers->work);
    pthread_mutex_destroy(&workers->lock);
    free(workers->threads);
    free(workers);
}
