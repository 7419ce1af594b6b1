#ifndef NVS_BACKEND_H
#define NVS_BACKEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "interface.h"

/* What a backend is: something that moves one aligned block between memory and file. The block is one
 * range of the file; in memory it may be scattered. Lanes, cutting,
 * retries, resuming and statistics are the core's. backend_skeleton.c states each hook's contract
 * and is the file to copy for a new backend; a new backend is one new file and nothing else.
 *
 * All hooks are called by one thread, the engine's I/O thread. */

#define BACKEND_ABI 4

/* Most pieces of memory and files that are registered at a time. */
enum { MEMORY_PIECE_LIMIT = 1024, FILE_TABLE_LIMIT = 64 };

/* Of one block. 64 x 4 KiB in one vectored block are moved 3.7 (read) and 11.6 (write) times as fast
 * as alone, 16 of them 3.4 and 7.2 times; the kernel takes up to 1024. */
enum { VECTOR_LIMIT = 64 };

struct backend_op {
    /* Set by the core, read by the backend. */
    int fd;
    int direction; /* enum nvs_direction */
    struct iovec *vectors;       /* where in memory, in the order of the file; made anew for each try */
    uint32_t vector_count;       /* 1 to VECTOR_LIMIT */
    uint32_t nbytes;             /* of all of them; above 0, below 2 GiB */
    uint64_t offset_bytes;
    uint32_t slot;   /* below queue_depth, unique among the blocks in flight */
    int memory_index; /* of the registered memory that holds all vectors, or -1 */
    int file_index;   /* of the registered file, or -1; fd is valid all the same */
    /* Set by the backend before it hands the op back from reap: bytes moved, or a negated errno. */
    int64_t result;
    /* The backend's while the op is in flight. */
    struct backend_op *next;
};

struct backend_options {
    uint32_t queue_depth; /* in: wanted; out: granted, at least 1 and at most what was wanted */
    uint32_t thread_count;
    int wake_fd;                 /* an eventfd: reap returns when it is readable, and never reads it */
    const struct backend *inner; /* for a backend over another one, else NULL */
    const char *fault_script;
    char *reason; /* out, when open fails: what was refused, in one line */
    size_t reason_nbytes;
};

enum { DEVICE_REFUSAL_NBYTES = 256 };

/* How a backend has moved memory of a device (a GPU), so far. */
struct device_report {
    uint64_t gpudirect_nbytes;
    uint64_t bounced_nbytes; /* through host memory */
    const char *refusal;     /* why not the former, not any more; the backend's, to its close */
};

struct backend {
    uint32_t abi; /* BACKEND_ABI */
    const char *name;
    /* Required. */
    int (*open)(void **state, struct backend_options *options);
    int (*submit)(void *state, struct backend_op **ops, uint32_t count);
    int (*reap)(void *state, struct backend_op **done, uint32_t capacity, int64_t timeout_ns);
    void (*close)(void *state);
    /* Optional, NULL where there is nothing to gain; a register without its unregister is refused. */
    int (*register_memory)(void *state, void *memory, uint64_t nbytes);
    void (*unregister_memory)(void *state, int index);
    int (*register_file)(void *state, int fd);
    void (*unregister_file)(void *state, int index);
    /* With it, what is registered is memory of a device: the core never touches it, and a transfer
     * that it would have to copy is refused. */
    bool memory_is_of_device;
    void (*report)(void *state, struct device_report *report); /* by any thread */
    /* Only backend_fault.c; may be called by any thread. */
    int (*inject)(void *state, const char *fault_script);
};

/* Makes a backend known by its name; each backend's file calls it from a constructor. */
void backend_register(const struct backend *backend);

/* The backend of that name, or NULL with the reason: unknown, another ABI, or which hook it lacks. */
const struct backend *backend_choose(const char *name, char *reason, size_t reason_nbytes);

/* A list of ops, first in, first out. */
struct op_queue {
    struct backend_op *head;
    struct backend_op **tail;
};

void op_queue_init(struct op_queue *queue);
void op_queue_push(struct op_queue *queue, struct backend_op *op);
struct backend_op *op_queue_pop(struct op_queue *queue);

/* Waits until one of the descriptors is readable (second may be -1), a signal, or the timeout
 * (negative: none). */
void wait_readable(int first_fd, int second_fd, int64_t timeout_ns);

#endif
