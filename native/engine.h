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
#include "stripe.h"

/* What a block may hold at most is a multiple of it. */
enum { BLOCK_MULTIPLE_NBYTES = 4096 };

/* The core's own types. Who touches what:
 *   caller threads   mailbox (under its lock), references, counters
 *   I/O thread       everything else of an engine, and a request from submit until it is finished */

/* One file of the filesystem. */
struct member {
    int fd;
    int direct_mode; /* enum nvs_direct_mode */
    atomic_bool direct;
    atomic_int fallback_errno;
    _Atomic(struct file_table *) table; /* of the engine it is registered with, or NULL */
    int index;                          /* there; that engine's I/O thread's */
    dev_t device;
    uint32_t tag_count;        /* requests that its device holds; 0: not known */
    uint32_t tag_limit_nbytes; /* the largest of them */
};

/* What callers see as a file: one member, or several behind one range of offsets. */
struct nvs_file {
    atomic_int references; /* the caller's, and one for each request in flight */
    uint32_t offset_alignment_nbytes; /* the strictest of the members', as the next */
    uint32_t memory_alignment_nbytes;
    struct stripe_layout layout;
    uint32_t member_count;
    struct member members[];
};

/* A device's tags that an engine has in use. */
struct device_use {
    dev_t device;
    uint32_t tag_count;
};

/* Devices counted one by one; those beyond share the last count, which only makes them wait. */
enum { DEVICE_LIMIT = 16 };

/* Bytes that a caller has named, and how they fared. */
struct piece {
    char *memory;
    uint64_t offset_bytes;
    uint64_t nbytes;
    uint64_t done_nbytes;
    uint64_t error_offset_bytes;
    uint32_t index; /* in the caller's order */
    uint32_t tries;
    int32_t status;
};

struct nvs_request {
    atomic_int references; /* the caller's, and the engine's until it is finished */
    event finished;
    pid_t pid;
    nvs_file *file;
    int direction; /* enum nvs_direction */
    int lane;
    int64_t submitted_ns;
    int64_t finished_ns;      /* final once finished */
    nvs_request *next;        /* in a lane */
    nvs_request *next_cancel; /* in the mailbox */
    bool cancel_posted;       /* under the mailbox lock */
    uint32_t in_flight_count; /* blocks not yet judged for good */
    bool queued;              /* in a lane: more blocks are to be cut */
    size_t failure_count;     /* final, as all of the pieces, once finished */
    size_t piece_count;
    size_t at_piece;          /* the next to cut from */
    uint64_t cut_nbytes;      /* already cut from that */
    struct piece pieces[];    /* by offset */
};

/* Bytes of one piece in a block: where the kernel moves them, and where they belong. Or a gap between
 * two pieces, that is read over. */
struct span {
    struct piece *piece;    /* NULL: a gap, of which nothing is wanted */
    char *memory;
    char *copy_to;          /* a bounced read: the caller's memory, else NULL */
    uint32_t wanted_nbytes;
    uint32_t length_nbytes; /* what the kernel moves: wanted, padded when bounced */
};

/* One block in work: queue_depth of them. A block is one range of one member, made of spans that lie
 * side by side in it. When one of several pieces fails, they are moved again one by one (it is
 * careful then), so that only those fail that must. */
struct block {
    struct backend_op op;
    nvs_request *request;
    struct member *member;
    struct span *spans;     /* with `vectors` and `bounce`: once it has needed them */
    struct iovec *vectors;
    char *bounce;
    uint32_t span_count;
    uint32_t span_at;       /* the first that is not over */
    uint32_t bounced_nbytes;
    uint64_t offset_bytes;  /* in the file */
    uint64_t member_offset_bytes; /* the same in the member */
    uint32_t wanted_nbytes;
    uint32_t length_nbytes; /* of all spans */
    uint32_t over_nbytes;   /* of the spans that are over */
    uint32_t done_nbytes;   /* aligned progress, at least over_nbytes */
    uint32_t aim_nbytes;    /* the progress that ends this try */
    uint32_t aim_padding_nbytes; /* at its end: a read need not bring it */
    uint32_t tries;
    struct device_use *device_use; /* NULL: its device's tags are not known */
    uint32_t tag_count; /* of them, while in the backend */
    bool careful;
    bool direct; /* how it was submitted last */
};

enum counter {
    READ_DIRECT, READ_BUFFERED, WRITE_DIRECT, WRITE_BUFFERED, BOUNCED, REQUESTS, BLOCKS, RETRIES,
    ERRORS, IN_FLIGHT, REGISTERED, QUEUE_DEPTH, COUNTER_COUNT
};

struct nvs_engine {
    pid_t pid;
    const struct backend *backend;
    struct backend_options backend_options;
    void *backend_state;
    bool memory_is_of_device; /* what is registered */
    uint64_t block_nbytes;
    uint64_t background_nbytes; /* most in flight of prefetch and writeback while demand is recent */
    pthread_t thread;
    event opened; /* the backend is open, or open_status says why not */
    int open_status;
    event drained; /* the thread is over */
    atomic_uint_fast64_t counters[COUNTER_COUNT];
    atomic_uint_fast64_t latencies[NVS_LANE_COUNT][NVS_LATENCY_BUCKET_COUNT];

    pthread_mutex_t mailbox_lock; /* guards mailbox, cancels, memory_calls, stopping and woken */
    struct lane mailbox[NVS_LANE_COUNT];
    nvs_request *cancels;
    struct memory_call *memory_calls;
    bool stopping;
    bool woken; /* wake_fd is readable */
    int wake_fd; /* an eventfd, readable while there is something new for the I/O thread */

    struct lane lanes[NVS_LANE_COUNT];
    int64_t demand_recent_until_ns;
    struct block *blocks;       /* queue_depth of them */
    char *gap_memory;           /* what gaps are read into, all of them; once it has been needed */
    struct block **free_blocks; /* a stack */
    struct backend_op **ready;  /* a ring of blocks to submit, oldest first */
    uint32_t queue_depth;
    uint32_t depth_limit; /* at most that many blocks, for now: the kernel has said EAGAIN */
    uint32_t depth_credit; /* blocks that came back since it was raised last */
    uint32_t free_count;
    uint32_t ready_head;
    uint32_t ready_count;
    uint32_t in_backend_count;
    struct device_use devices[DEVICE_LIMIT];
    uint32_t device_count;
    struct memory_table memory_table;
    struct file_table *file_table;
    uint32_t registered_file_count;
    uint32_t file_limit;
    bool paused; /* something said EAGAIN: reap or wait before submitting again */
};

/* engine.c: under the mailbox lock. */
void engine_wake(nvs_engine *engine);

/* request.c */
nvs_request *request_new(nvs_file *file, int direction, int lane, const nvs_piece *pieces,
                         size_t piece_count);
void request_discard(nvs_request *request);
void request_finish(nvs_request *request);
void member_fall_back(struct member *member, int reason);

/* cut.c: from requests to blocks. */

/* Takes a free block and fills it from the lane's first request. False when memory is short: then
 * a piece has failed, and nothing was taken. */
bool cut_block(nvs_engine *engine, struct lane *lane, uint64_t most_nbytes);
/* The block's next try: from where it has got to its end or, when it is careful, to a piece's. */
void aim_block(struct block *block);
/* Ends the spans that lie within the progress made. */
void close_spans(struct block *block);
/* Does what is left of it belong to several pieces? */
bool is_shared(const struct block *block);
/* Ends the piece that it stands at, which failed. */
void fail_piece(nvs_engine *engine, struct block *block, int status);
/* Nothing more is cut from the request. */
void request_stop(nvs_engine *engine, nvs_request *request, int status);

/* transfer.c: what the I/O thread does in each turn. */
void start_blocks(nvs_engine *engine);
void reap_complete(nvs_engine *engine);
/* Finishes the request if nothing of it is left to do. */
void settle_request(nvs_engine *engine, nvs_request *request);

/* statistics.c */
void count_latency(nvs_engine *engine, int lane, int64_t took_ns);

static inline void count(nvs_engine *engine, enum counter which, uint64_t amount)
{
    atomic_fetch_add_explicit(&engine->counters[which], amount, memory_order_relaxed);
}

#endif
