#ifndef NVS_ENGINE_H
#define NVS_ENGINE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "backend.h"
#include "event.h"
#include "lanes.h"
#include "registration.h"

/* Sizes of blocks, but for a request's last one, are multiples of it. */
enum { BLOCK_MULTIPLE_NBYTES = 4096 };

/* The core's own types. Who touches what:
 *   caller threads   mailbox (under its lock), references, counters
 *   I/O thread       everything else of an engine, and a request from submit until it is finished */

struct nvs_file {
    atomic_int references; /* the caller's, and one for each request in flight */
    int fd;
    int direct_mode; /* enum nvs_direct_mode */
    atomic_bool direct;
    atomic_int fallback_errno;
    uint32_t offset_alignment_nbytes;
    uint32_t memory_alignment_nbytes;
    _Atomic(struct file_table *) table; /* of the engine it is registered with, or NULL */
    int index;                          /* there; that engine's I/O thread's */
    uint32_t tag_count;        /* requests that its device holds; 0: not known */
    uint32_t tag_limit_nbytes; /* the largest of them */
};

struct nvs_request {
    atomic_int references; /* the caller's, and the engine's until it is finished */
    event finished;
    pid_t pid;
    nvs_transfer transfer;
    nvs_result result;        /* final once finished */
    nvs_request *next;        /* in a lane */
    int lane;
    uint64_t cut_nbytes;      /* already cut into blocks */
    uint32_t in_flight_count; /* blocks not yet judged for good */
    bool queued;              /* in a lane: more blocks are to be cut */
};

/* One block in work: queue_depth of them, each with a bounce buffer once it has needed one. */
struct block {
    struct backend_op op;
    nvs_request *request;
    char *memory;          /* the caller's bytes of this block */
    char *bounce;
    uint64_t offset_bytes; /* in the file */
    uint32_t wanted_nbytes;
    uint32_t length_nbytes; /* what the kernel moves: wanted, padded when bounced */
    uint32_t done_nbytes;   /* aligned progress */
    uint32_t tries;
    uint32_t tag_count; /* of the device's, while in the backend */
    bool bounced;
    bool direct; /* how it was submitted last */
};

enum counter {
    READ_DIRECT, READ_BUFFERED, WRITE_DIRECT, WRITE_BUFFERED, BOUNCED, REQUESTS, BLOCKS, RETRIES,
    ERRORS, IN_FLIGHT, REGISTERED, COUNTER_COUNT
};

struct nvs_engine {
    pid_t pid;
    const struct backend *backend;
    struct backend_options backend_options;
    void *backend_state;
    uint64_t block_nbytes;
    uint64_t background_nbytes; /* most in flight of prefetch and writeback while demand is recent */
    pthread_t thread;
    event opened; /* the backend is open, or open_status says why not */
    int open_status;
    event drained; /* the thread is over */
    atomic_uint_fast64_t counters[COUNTER_COUNT];

    pthread_mutex_t mailbox_lock; /* guards mailbox, memory_calls, stopping and woken */
    struct lane mailbox[NVS_LANE_COUNT];
    struct memory_call *memory_calls;
    bool stopping;
    bool woken; /* wake_fd is readable */
    int wake_fd; /* an eventfd, readable while there is something new for the I/O thread */

    struct lane lanes[NVS_LANE_COUNT];
    int64_t demand_recent_until_ns;
    struct block *blocks;       /* queue_depth of them */
    struct block **free_blocks; /* a stack */
    struct backend_op **ready;  /* a ring of blocks to submit, oldest first */
    uint32_t queue_depth;
    uint32_t free_count;
    uint32_t ready_head;
    uint32_t ready_count;
    uint32_t in_backend_count;
    uint32_t tags_in_use;
    struct memory_table memory_table;
    struct file_table *file_table;
    uint32_t registered_file_count;
    uint32_t file_limit;
    bool paused; /* something said EAGAIN: reap or wait before submitting again */
};

/* engine.c: under the mailbox lock. */
void engine_wake(nvs_engine *engine);

/* request.c */
nvs_request *request_new(const nvs_transfer *transfer);
void request_finish(nvs_request *request);
void file_fall_back(nvs_file *file, int reason);

/* transfer.c: what the I/O thread does in each turn. */
void start_blocks(nvs_engine *engine);
void reap_complete(nvs_engine *engine);

static inline void count(nvs_engine *engine, enum counter which, uint64_t amount)
{
    atomic_fetch_add_explicit(&engine->counters[which], amount, memory_order_relaxed);
}

#endif
