/* Linux AIO through libaio.
 *
 * Facts of the kernel, and what follows:
 * - io_submit may take only the first few iocbs, and refuses the next one at the following call: so
 *   a short count is an ordinary answer.
 * - A misaligned address or offset is no submit error: it comes as the event's res, -EINVAL.
 * - io_setup(n) counts against fs.aio-max-nr for the whole machine (EAGAIN): ask for less.
 * - io_submit blocks on writes that extend a file and past the device's tags: so it belongs on the
 *   I/O thread, never on the caller's.
 * - With IOCB_FLAG_RESFD completions make an eventfd readable, so one poll waits for both a
 *   completion and the mailbox.
 * - io_destroy waits for what is in flight; the core drains first, so here it never does. */
#define _GNU_SOURCE
#include "backend.h"

#include <errno.h>
#include <libaio.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct aio {
    io_context_t context;
    int completion_fd;
    int wake_fd;
    uint32_t queue_depth;
    struct iocb **batch;
    struct io_event *events;
    struct iocb *iocbs; /* by op->slot */
};

static void aio_close(void *state);

static int aio_open(void **state, struct backend_options *options)
{
    struct aio *aio = calloc(1, sizeof *aio);
    if (!aio)
        return -ENOMEM;
    aio->wake_fd = options->wake_fd;
    aio->completion_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int rc = aio->completion_fd < 0 ? -errno : 0;
    uint32_t depth = options->queue_depth;
    if (rc == 0) {
        while ((rc = io_setup((int)depth, &aio->context)) == -EAGAIN && depth > 1)
            depth /= 2;
        if (rc < 0)
            aio->context = NULL;
    }
    if (rc < 0) {
        snprintf(options->reason, options->reason_nbytes, "io_setup: %s%s", strerror(-rc),
                 rc == -EAGAIN ? " (fs.aio-max-nr is used up)" : "");
    } else {
        aio->batch = calloc(depth, sizeof *aio->batch);
        aio->events = calloc(depth, sizeof *aio->events);
        aio->iocbs = calloc(depth, sizeof *aio->iocbs);
        if (!aio->batch || !aio->events || !aio->iocbs)
            rc = -ENOMEM;
    }
    if (rc < 0) {
        aio_close(aio);
        return rc;
    }
    aio->queue_depth = options->queue_depth = depth;
    *state = aio;
    return 0;
}

static int aio_submit(void *state, struct backend_op **ops, uint32_t count)
{
    struct aio *aio = state;
    for (uint32_t i = 0; i < count; i++) {
        struct backend_op *op = ops[i];
        struct iocb *iocb = &aio->iocbs[op->slot];
        if (op->direction == NVS_READ)
            io_prep_preadv(iocb, op->fd, op->vectors, (int)op->vector_count,
                           (long long)op->offset_bytes);
        else
            io_prep_pwritev(iocb, op->fd, op->vectors, (int)op->vector_count,
                            (long long)op->offset_bytes);
        io_set_eventfd(iocb, aio->completion_fd);
        iocb->data = op;
        aio->batch[i] = iocb;
    }
    int taken = io_submit(aio->context, count, aio->batch);
    return taken == 0 ? -EAGAIN : taken;
}

static int aio_take_events(struct aio *aio, struct backend_op **done, uint32_t capacity)
{
    struct timespec no_wait = {0, 0};
    if (capacity > aio->queue_depth)
        capacity = aio->queue_depth;
    int count = io_getevents(aio->context, 0, capacity, aio->events, &no_wait);
    for (int i = 0; i < count; i++) {
        done[i] = aio->events[i].data;
        done[i]->result = (int64_t)aio->events[i].res;
    }
    return count;
}

static int aio_reap(void *state, struct backend_op **done, uint32_t capacity, int64_t timeout_ns)
{
    struct aio *aio = state;
    int count = aio_take_events(aio, done, capacity);
    if (count != 0 || timeout_ns == 0)
        return count;
    wait_readable(aio->completion_fd, aio->wake_fd, timeout_ns);
    /* Cleared before events are taken: what completes in between makes it readable again. */
    uint64_t ignored;
    if (read(aio->completion_fd, &ignored, sizeof ignored) < 0 && errno != EAGAIN)
        return -errno;
    return aio_take_events(aio, done, capacity);
}

static void aio_close(void *state)
{
    struct aio *aio = state;
    if (aio->context)
        io_destroy(aio->context);
    if (aio->completion_fd >= 0)
        close(aio->completion_fd);
    free(aio->batch);
    free(aio->events);
    free(aio->iocbs);
    free(aio);
}

static const struct backend aio_backend = {
    .abi = BACKEND_ABI,
    .name = "aio",
    .open = aio_open,
    .submit = aio_submit,
    .reap = aio_reap,
    .close = aio_close,
};

static __attribute__((constructor)) void aio_register(void)
{
    backend_register(&aio_backend);
}
