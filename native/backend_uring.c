/* io_uring through liburing: one ring, owned by the I/O thread.
 *
 * Facts of the kernel (seen on 6.18 unless a source is named), and what follows:
 * - With SINGLE_ISSUER only the thread that set the ring up may enter it, and DEFER_TASKRUN lets
 *   completions run nowhere but in its wait: no interrupted computing, and batches. Both want a ring
 *   that is opened on the I/O thread. Older kernels refuse unknown flags with EINVAL, so they are
 *   dropped one by one. NO_SQARRAY is never asked for: liburing before 2.6 writes its index array
 *   over the ring's head.
 * - SUBMIT_ALL goes on past an entry that is refused; either way the refusal comes as a completion.
 * - A poll on the wake eventfd makes waiting for completions and for mail one system call. A READ
 *   would not do: on an O_NONBLOCK file it ends with EAGAIN at once, and reap must not read it.
 * - Entering costs about 1 us, so entries wait for company: for a full batch, or for the next reap,
 *   which submits and waits in one call.
 * - A completion may say EAGAIN or EINTR (XFS does): the core tries again, as with every backend.
 * - Registered memory saves pinning pages at each transfer: 0.60 to 0.78 of the CPU at 512 KiB,
 *   0.78 to 0.80 at 64 KiB; a registered file up to 10 %. Tables with empty entries, to be filled
 *   one by one, exist since 5.19; before it nothing is registered.
 * - A ring's memory that a forked child shares would let it submit in our name (or hold pinned pages
 *   after our close), so it is DONTFORK, and the child closes its copy of the descriptor.
 * - Closing a ring waits for nothing; the core drains first.
 * - Containers' seccomp profiles answer EPERM or ENOSYS, sysctl kernel.io_uring_disabled EPERM. */
#define _GNU_SOURCE
#include "backend.h"

#include <errno.h>
#include <liburing.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Vectors in registered memory, since 6.15; not in older headers. */
enum { OP_READV_FIXED = 60, OP_WRITEV_FIXED = 61 };
/* +10 to 24 % at 4 KiB against one enter for a whole queue; at 512 KiB one each costs 5 to 9 %. */
enum { ENTER_BATCH = 8 };
/* Between tries while the kernel takes nothing, for want of memory for one. Arbitrary. */
static const int64_t REFUSED_PAUSE_NS = 1000000;

/* In the order in which they are dropped: DEFER_TASKRUN is refused without SINGLE_ISSUER. */
static const unsigned optional_flags[] = {
    IORING_SETUP_DEFER_TASKRUN, IORING_SETUP_SINGLE_ISSUER, IORING_SETUP_SUBMIT_ALL,
    IORING_SETUP_CLAMP,
};
enum { OPTIONAL_FLAG_COUNT = sizeof optional_flags / sizeof *optional_flags };

/* Which entries of a table in the kernel are taken. */
struct index_table {
    bool open;
    bool taken[MEMORY_PIECE_LIMIT];
};

struct uring {
    struct io_uring ring;
    struct index_table memory;
    struct index_table files;
    bool has_fixed_vectors;
    int wake_fd;
    bool wake_armed;
    uint32_t waiting_count; /* entries that the kernel has not been shown */
    struct uring *next;     /* among the open ones */
};

/* --- fork -------------------------------------------------------------------------------------- */

static pthread_mutex_t open_rings_lock = PTHREAD_MUTEX_INITIALIZER;
static struct uring *open_rings;

static void uring_before_fork(void)
{
    pthread_mutex_lock(&open_rings_lock);
}

static void uring_after_fork(void)
{
    pthread_mutex_unlock(&open_rings_lock);
}

static void uring_in_child(void)
{
    for (struct uring *uring = open_rings; uring; uring = uring->next)
        close(uring->ring.ring_fd);
    open_rings = NULL;
    pthread_mutex_unlock(&open_rings_lock);
}

static void uring_list(struct uring *uring)
{
    pthread_mutex_lock(&open_rings_lock);
    uring->next = open_rings;
    open_rings = uring;
    pthread_mutex_unlock(&open_rings_lock);
}

/* Closed under the lock, so that no child closes a descriptor of that number that is another's. */
static void uring_unlist_and_exit(struct uring *uring)
{
    pthread_mutex_lock(&open_rings_lock);
    struct uring **at = &open_rings;
    while (*at != uring)
        at = &(*at)->next;
    *at = uring->next;
    io_uring_queue_exit(&uring->ring);
    pthread_mutex_unlock(&open_rings_lock);
}

/* --- the hooks --------------------------------------------------------------------------------- */

/* Fewer flags on EINVAL, a smaller ring on ENOMEM (before 5.12 rings count against memlock). */
static int uring_set_up(struct uring *uring, unsigned entries, uint32_t *granted_count)
{
    for (;;) {
        struct io_uring_params params = {0};
        for (int i = 0; i < OPTIONAL_FLAG_COUNT; i++)
            params.flags |= optional_flags[i];
        int rc = io_uring_queue_init_params(entries, &uring->ring, &params);
        for (int i = 0; rc == -EINVAL && i < OPTIONAL_FLAG_COUNT; i++) {
            unsigned flags = params.flags & ~optional_flags[i];
            params = (struct io_uring_params){.flags = flags};
            rc = io_uring_queue_init_params(entries, &uring->ring, &params);
        }
        *granted_count = params.sq_entries;
        if (rc != -ENOMEM || entries <= 2)
            return rc;
        entries /= 2;
    }
}

static bool uring_knows(struct uring *uring, int opcode)
{
    struct io_uring_probe *probe = io_uring_get_probe_ring(&uring->ring);
    bool knows = probe && probe->last_op >= opcode && (probe->ops[opcode].flags & IO_URING_OP_SUPPORTED);
    free(probe);
    return knows;
}

static const char *uring_hint(int rc)
{
    return rc == -EPERM    ? " (forbidden by sysctl kernel.io_uring_disabled or by a seccomp profile)"
           : rc == -ENOSYS ? " (the kernel has no io_uring, or a container's seccomp profile hides it)"
           : rc == -ENOMEM ? " (memory, or the memlock limit, is used up)"
                           : "";
}

static int uring_open(void **state, struct backend_options *options)
{
    struct uring *uring = calloc(1, sizeof *uring);
    if (!uring)
        return -ENOMEM;
    uring->wake_fd = options->wake_fd;
    /* One more for the poll. */
    uint32_t granted_count;
    int rc = uring_set_up(uring, options->queue_depth + 1, &granted_count);
    if (rc < 0) {
        snprintf(options->reason, options->reason_nbytes, "io_uring_setup: %s%s", strerror(-rc),
                 uring_hint(rc));
        free(uring);
        return rc;
    }
    rc = io_uring_ring_dontfork(&uring->ring);
    if (!(uring->ring.features & IORING_FEAT_EXT_ARG)) {
        rc = -EOPNOTSUPP;
        snprintf(options->reason, options->reason_nbytes, "io_uring of a kernel before 5.11");
    }
    if (rc < 0) {
        io_uring_queue_exit(&uring->ring);
        free(uring);
        return rc;
    }
    uring->has_fixed_vectors = uring_knows(uring, OP_WRITEV_FIXED);
    uring_list(uring);
    if (options->queue_depth > granted_count - 1)
        options->queue_depth = granted_count - 1;
    *state = uring;
    return 0;
}

/* A vector that may not use registered memory is moved as any memory. */
static void uring_prepare(const struct uring *uring, struct io_uring_sqe *entry,
                          struct backend_op *op)
{
    bool is_read = op->direction == NVS_READ;
    bool is_single = op->vector_count == 1;
    bool is_fixed = op->memory_index >= 0 && (is_single || uring->has_fixed_vectors);
    int opcode = is_single ? is_fixed ? is_read ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED
                                      : is_read ? IORING_OP_READ : IORING_OP_WRITE
                           : is_fixed ? is_read ? OP_READV_FIXED : OP_WRITEV_FIXED
                                      : is_read ? IORING_OP_READV : IORING_OP_WRITEV;
    int fd = op->file_index >= 0 ? op->file_index : op->fd;
    const void *memory = is_single ? op->vectors[0].iov_base : op->vectors;
    uint32_t length = is_single ? op->nbytes : op->vector_count;
    io_uring_prep_rw(opcode, entry, fd, memory, length, op->offset_bytes);
    entry->buf_index = is_fixed ? (uint16_t)op->memory_index : 0;
    entry->flags = op->file_index >= 0 ? IOSQE_FIXED_FILE : 0;
    io_uring_sqe_set_data(entry, op);
}

static int uring_submit(void *state, struct backend_op **ops, uint32_t count)
{
    struct uring *uring = state;
    for (uint32_t i = 0; i < count; i++) {
        struct backend_op *op = ops[i];
        /* Never NULL: the ring has room for the whole queue_depth and the poll. */
        struct io_uring_sqe *entry = io_uring_get_sqe(&uring->ring);
        uring_prepare(uring, entry, op);
    }
    uring->waiting_count += count;
    /* What is not taken now stays in the ring for the next enter. */
    if (uring->waiting_count >= ENTER_BATCH && io_uring_submit(&uring->ring) >= 0)
        uring->waiting_count = io_uring_sq_ready(&uring->ring);
    return (int)count;
}

static int uring_take_events(struct uring *uring, struct backend_op **done, uint32_t capacity)
{
    struct io_uring_cqe *event;
    unsigned head, seen_count = 0;
    uint32_t count = 0;
    io_uring_for_each_cqe(&uring->ring, head, event)
    {
        if (count == capacity)
            break;
        seen_count++;
        struct backend_op *op = io_uring_cqe_get_data(event);
        if (!op) {
            uring->wake_armed = false;
            continue;
        }
        op->result = event->res;
        done[count++] = op;
    }
    io_uring_cq_advance(&uring->ring, seen_count);
    return (int)count;
}

static void uring_arm_wake(struct uring *uring)
{
    struct io_uring_sqe *entry = uring->wake_armed ? NULL : io_uring_get_sqe(&uring->ring);
    if (!entry)
        return;
    io_uring_prep_poll_add(entry, uring->wake_fd, POLLIN);
    io_uring_sqe_set_data(entry, NULL);
    uring->wake_armed = true;
}

static int uring_reap(void *state, struct backend_op **done, uint32_t capacity, int64_t timeout_ns)
{
    struct uring *uring = state;
    int count = uring_take_events(uring, done, capacity);
    if (count != 0)
        return count;
    uring_arm_wake(uring);
    struct io_uring_cqe *event;
    struct __kernel_timespec timeout = {timeout_ns / 1000000000, timeout_ns % 1000000000};
    struct __kernel_timespec *until = timeout_ns < 0 ? NULL : &timeout;
    int rc = timeout_ns == 0
                 ? io_uring_submit_and_get_events(&uring->ring)
                 : io_uring_submit_and_wait_timeout(&uring->ring, &event, 1, until, NULL);
    uring->waiting_count = io_uring_sq_ready(&uring->ring);
    count = uring_take_events(uring, done, capacity);
    if (rc < 0 && rc != -ETIME && rc != -EINTR && count == 0 && timeout_ns != 0)
        wait_readable(uring->wake_fd, uring->ring.ring_fd, REFUSED_PAUSE_NS);
    return count;
}

static int uring_free_index(const struct index_table *table, int limit)
{
    int index = 0;
    while (index < limit && table->taken[index])
        index++;
    return index < limit ? index : -ENOSPC;
}

static int uring_register_memory(void *state, void *memory, uint64_t nbytes)
{
    struct uring *uring = state;
    int rc = uring->memory.open ? 0 : io_uring_register_buffers_sparse(&uring->ring, MEMORY_PIECE_LIMIT);
    if (rc < 0)
        return rc == -ENOMEM ? -ENOSPC : rc;
    uring->memory.open = true;
    int index = uring_free_index(&uring->memory, MEMORY_PIECE_LIMIT);
    if (index < 0)
        return index;
    struct iovec piece = {memory, nbytes};
    rc = io_uring_register_buffers_update_tag(&uring->ring, (unsigned)index, &piece, &(__u64){0}, 1);
    if (rc < 0)
        return rc;
    uring->memory.taken[index] = true;
    return index;
}

static void uring_unregister_memory(void *state, int index)
{
    struct uring *uring = state;
    struct iovec nothing = {NULL, 0};
    io_uring_register_buffers_update_tag(&uring->ring, (unsigned)index, &nothing, &(__u64){0}, 1);
    uring->memory.taken[index] = false;
}

static int uring_register_file(void *state, int fd)
{
    struct uring *uring = state;
    int rc = uring->files.open ? 0 : io_uring_register_files_sparse(&uring->ring, FILE_TABLE_LIMIT);
    if (rc < 0)
        return rc;
    uring->files.open = true;
    int index = uring_free_index(&uring->files, FILE_TABLE_LIMIT);
    if (index < 0)
        return index;
    rc = io_uring_register_files_update(&uring->ring, (unsigned)index, &fd, 1);
    if (rc < 0)
        return rc;
    uring->files.taken[index] = true;
    return index;
}

static void uring_unregister_file(void *state, int index)
{
    struct uring *uring = state;
    io_uring_register_files_update(&uring->ring, (unsigned)index, &(int){-1}, 1);
    uring->files.taken[index] = false;
}

/* The memory is let go of here, not when the last copy of the ring goes in some forked child. */
static void uring_close(void *state)
{
    struct uring *uring = state;
    if (uring->memory.open)
        io_uring_unregister_buffers(&uring->ring);
    if (uring->files.open)
        io_uring_unregister_files(&uring->ring);
    uring_unlist_and_exit(state);
    free(state);
}

static const struct backend uring_backend = {
    .abi = BACKEND_ABI,
    .name = "uring",
    .open = uring_open,
    .submit = uring_submit,
    .reap = uring_reap,
    .close = uring_close,
    .register_memory = uring_register_memory,
    .unregister_memory = uring_unregister_memory,
    .register_file = uring_register_file,
    .unregister_file = uring_unregister_file,
};

static __attribute__((constructor)) void uring_register(void)
{
    pthread_atfork(uring_before_fork, uring_after_fork, uring_in_child);
    backend_register(&uring_backend);
}
