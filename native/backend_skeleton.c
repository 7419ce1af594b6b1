/* The smallest backend that keeps the contract, and the place where the contract is written.
 *
 * Copy this file for a new backend, rename the functions (<backend>_<hook>, in this order) and
 * replace the bodies. It is compiled into every build and passes the same tests as the others, so
 * what it says holds. It moves each block with one system call on the I/O thread: correct and slow. */
#define _GNU_SOURCE
#include "backend.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/uio.h>

struct skeleton {
    int wake_fd;
    struct op_queue done;
};

/* open: required. Once, before all other hooks. May block. Returns 0 with *state set, or a negated
 * errno with options->reason filled and nothing left behind. Lowers options->queue_depth if the
 * kernel grants less. Descriptors that it opens are O_CLOEXEC. */
static int skeleton_open(void **state, struct backend_options *options)
{
    struct skeleton *skeleton = calloc(1, sizeof *skeleton);
    if (!skeleton)
        return -ENOMEM;
    skeleton->wake_fd = options->wake_fd;
    op_queue_init(&skeleton->done);
    *state = skeleton;
    return 0;
}

/* submit: required. Takes the first n of the ops and returns n (1 to count), or takes none and
 * returns a negated errno: -EAGAIN when it is full (the core reaps, then tries again), anything else
 * as the failure of ops[0] alone. An op taken is handed back by reap exactly once, and its memory
 * and fd stay valid until then. Never more than queue_depth ops are in flight. Should not block: a
 * demand read may be waiting behind it. */
static int skeleton_submit(void *state, struct backend_op **ops, uint32_t count)
{
    struct skeleton *skeleton = state;
    (void)count;
    struct backend_op *op = ops[0];
    int vector_count = (int)op->vector_count;
    ssize_t moved = op->direction == NVS_READ
                        ? preadv(op->fd, op->vectors, vector_count, (off_t)op->offset_bytes)
                        : pwritev(op->fd, op->vectors, vector_count, (off_t)op->offset_bytes);
    op->result = moved < 0 ? -errno : moved;
    op_queue_push(&skeleton->done, op);
    return 1;
}

/* reap: required. Waits until at least one op is complete, or wake_fd is readable, or the timeout is
 * over (negative: none; 0: never waits), whichever comes first; also when nothing is in flight.
 * Returns how many ops it put into done, each with its result: bytes moved (a short count is legal)
 * or a negated errno. Returns early and empty-handed on a signal. */
static int skeleton_reap(void *state, struct backend_op **done, uint32_t capacity,
                         int64_t timeout_ns)
{
    struct skeleton *skeleton = state;
    if (!skeleton->done.head)
        wait_readable(skeleton->wake_fd, -1, timeout_ns);
    uint32_t count = 0;
    while (count < capacity && (done[count] = op_queue_pop(&skeleton->done)))
        count++;
    return (int)count;
}

/* close: required. Once, after a successful open, with nothing in flight. May block; can't fail. */
static void skeleton_close(void *state)
{
    free(state);
}

/* register_memory, register_file: optional. Make memory, or a file, known beforehand and return the
 * index with which ops will name it, at least 0; or a negated errno, after which it is moved
 * unregistered. -ENOMEM: a smaller piece may do. Files are at most 64, their indices below 64.
 * unregister_memory, unregister_file: required with the former. Nothing in flight uses it. What is
 * still registered at close goes with it.
 *
 * memory_is_of_device: register_memory takes memory of a GPU and refuses any other. Then one op may
 * have vectors in both, and memory_index is -1. report: optional. */
static const struct backend skeleton_backend = {
    .abi = BACKEND_ABI,
    .name = "skeleton",
    .open = skeleton_open,
    .submit = skeleton_submit,
    .reap = skeleton_reap,
    .close = skeleton_close,
};

static __attribute__((constructor)) void skeleton_register(void)
{
    backend_register(&skeleton_backend);
}
