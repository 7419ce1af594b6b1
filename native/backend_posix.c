/* A few threads with preadv and pwritev: works on every filesystem, in every container.
 *
 * The choice where AIO is refused, and on tmpfs, where asynchronous interfaces do the copy inside
 * the submitting call. At 4 to 64 KiB it is as fast as AIO at twice the CPU. On tmpfs a small block
 * takes less time than waking a thread for it, so a thread takes several at once. */
#define _GNU_SOURCE
#include "backend.h"

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

struct posix {
    int wake_fd;
    int completion_fd; /* readable while `done` is not empty */
    uint32_t thread_count;
    pthread_t *threads;
    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t work;
    bool stopping;
    uint32_t idle_count;
    uint32_t waiting_count;
    struct op_queue waiting;
    struct op_queue done;
};

/* Under the lock. */
static uint32_t posix_take_work(struct posix *posix, struct backend_op **ops)
{
    uint32_t share = (posix->waiting_count + posix->thread_count - 1) / posix->thread_count;
    uint32_t count = 0;
    uint64_t nbytes = 0;
    while (count < share && count < TAKE_LIMIT && nbytes < TAKE_NBYTES
           && (ops[count] = op_queue_pop(&posix->waiting)))
        nbytes += ops[count++]->nbytes;
    posix->waiting_count -= count;
    return count;
}

static void posix_move(struct backend_op *op)
{
    int vector_count = (int)op->vector_count;
    ssize_t moved = op->direction == NVS_READ
                        ? preadv(op->fd, op->vectors, vector_count, (off_t)op->offset_bytes)
                        : pwritev(op->fd, op->vectors, vector_count, (off_t)op->offset_bytes);
    op->result = moved < 0 ? -errno : moved;
}

static void *posix_thread(void *argument)
{
    struct posix *posix = argument;
    struct backend_op *ops[TAKE_LIMIT];
    pthread_mutex_lock(&posix->lock);
    for (;;) {
        posix->idle_count++;
        while (!posix->waiting.head && !posix->stopping)
            pthread_cond_wait(&posix->work, &posix->lock);
        posix->idle_count--;
        uint32_t count = posix_take_work(posix, ops);
        if (count == 0)
            break;
        pthread_mutex_unlock(&posix->lock);
        for (uint32_t i = 0; i < count; i++)
            posix_move(ops[i]);
        pthread_mutex_lock(&posix->lock);
        if (!posix->done.head)
            eventfd_write(posix->completion_fd, 1);
        for (uint32_t i = 0; i < count; i++)
            op_queue_push(&posix->done, ops[i]);
    }
    pthread_mutex_unlock(&posix->lock);
    return NULL;
}

static void posix_close(void *state);

static int posix_open(void **state, struct backend_options *options)
{
    struct posix *posix = calloc(1, sizeof *posix);
    if (!posix)
        return -ENOMEM;
    posix->wake_fd = options->wake_fd;
    pthread_mutex_init(&posix->lock, NULL);
    pthread_cond_init(&posix->work, NULL);
    op_queue_init(&posix->waiting);
    op_queue_init(&posix->done);
    posix->completion_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    posix->threads = calloc(options->thread_count, sizeof *posix->threads);
    int rc = posix->completion_fd < 0 ? -errno : !posix->threads ? -ENOMEM : 0;
    while (rc == 0 && posix->thread_count < options->thread_count) {
        rc = -pthread_create(&posix->threads[posix->thread_count], NULL, posix_thread, posix);
        if (rc == 0)
            pthread_setname_np(posix->threads[posix->thread_count++], "nvmeswap-posix");
    }
    if (rc < 0) {
        snprintf(options->reason, options->reason_nbytes, "starting threads: %s", strerror(-rc));
        posix_close(posix);
        return rc;
    }
    *state = posix;
    return 0;
}

static int posix_submit(void *state, struct backend_op **ops, uint32_t count)
{
    struct posix *posix = state;
    pthread_mutex_lock(&posix->lock);
    for (uint32_t i = 0; i < count; i++)
        op_queue_push(&posix->waiting, ops[i]);
    posix->waiting_count += count;
    for (uint32_t i = 0; i < count && i < posix->idle_count; i++)
        pthread_cond_signal(&posix->work);
    pthread_mutex_unlock(&posix->lock);
    return (int)count;
}

static int posix_take_done(struct posix *posix, struct backend_op **done, uint32_t capacity)
{
    uint32_t count = 0;
    pthread_mutex_lock(&posix->lock);
    while (count < capacity && (done[count] = op_queue_pop(&posix->done)))
        count++;
    eventfd_t ignored;
    if (count > 0 && !posix->done.head)
        eventfd_read(posix->completion_fd, &ignored);
    pthread_mutex_unlock(&posix->lock);
    return (int)count;
}

static int posix_reap(void *state, struct backend_op **done, uint32_t capacity, int64_t timeout_ns)
{
    struct posix *posix = state;
    int count = posix_take_done(posix, done, capacity);
    if (count != 0 || timeout_ns == 0)
        return count;
    wait_readable(posix->completion_fd, posix->wake_fd, timeout_ns);
    return posix_take_done(posix, done, capacity);
}

static void posix_close(void *state)
{
    struct posix *posix = state;
    pthread_mutex_lock(&posix->lock);
    posix->stopping = true;
    pthread_cond_broadcast(&posix->work);
    pthread_mutex_unlock(&posix->lock);
    for (uint32_t i = 0; i < posix->thread_count; i++)
        pthread_join(posix->threads[i], NULL);
    if (posix->completion_fd >= 0)
        close(posix->completion_fd);
    pthread_cond_destroy(&posix->work);
    pthread_mutex_destroy(&posix->lock);
    free(posix->threads);
    free(posix);
}

static const struct backend posix_backend = {
    .abi = BACKEND_ABI,
    .name = "posix",
    .open = posix_open,
    .submit = posix_submit,
    .reap = posix_reap,
    .close = posix_close,
};

static __attribute__((constructor)) void posix_register(void)
{
    backend_register(&posix_backend);
}
