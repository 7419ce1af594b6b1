/* The I/O thread's work: cut requests into blocks, submit them, judge what comes back.
 *
 * A block is in one of three places: the stack of free ones, the ready ring, or the backend. It
 * leaves its request only when it is finished or has failed for good, and a request is finished when
 * it has no block left: so nothing lands in memory that its owner has got back. */
#define _GNU_SOURCE
#include "engine.h"
#include "split.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Small blocks go to the kernel a few at a time, so that the disk starts before the queue is full:
 * +10 to 24 % at 4 KiB on one virtual disk. */
enum { SUBMIT_BATCH = 8 };
/* Few, so that copies out of bounce buffers do not let the kernel's queue run dry. */
enum { REAP_BATCH = 8 };
/* Tries of one block without progress. Arbitrary; with the pause between tries at least 0.1 s when nothing else completes. */
enum { TRY_LIMIT = 100 };
/* Up to here copying a block costs no more than a block of its own for the tail (about 7 us). */
enum { TAIL_CUT_NBYTES = 65536 };
static const int64_t PAUSE_NS = 1000000;
static const size_t BOUNCE_ALIGNMENT_NBYTES = 4096;

static void settle_request(nvs_engine *engine, nvs_request *request)
{
    if (request->in_flight_count > 0 || request->queued)
        return;
    if (request->result.status != 0)
        count(engine, ERRORS, 1);
    count(engine, IN_FLIGHT, (uint64_t)-1);
    request_finish(request);
}

/* The first failure is the request's; what was not yet cut of it is dropped. */
static void fail_request(nvs_engine *engine, struct block *block, int status)
{
    nvs_request *request = block->request;
    if (request->result.status != 0)
        return;
    request->result.status = status;
    request->result.tries = block->tries;
    request->result.error_offset_bytes = block->offset_bytes + block->done_nbytes;
    if (request->queued) {
        lane_remove(&engine->lanes[request->lane], request);
        request->queued = false;
    }
}

static void retire_block(nvs_engine *engine, struct block *block)
{
    nvs_request *request = block->request;
    engine->free_blocks[engine->free_count++] = block;
    request->in_flight_count--;
    engine->lanes[request->lane].in_flight_nbytes -= block->wanted_nbytes;
    if (request->lane == NVS_DEMAND)
        lane_note_demand(engine);
    settle_request(engine, request);
}

static void fail_block(nvs_engine *engine, struct block *block, int status)
{
    fail_request(engine, block, status);
    retire_block(engine, block);
}

static void finish_block(nvs_engine *engine, struct block *block)
{
    if (block->bounced && block->op.direction == NVS_READ)
        memcpy(block->memory, block->bounce, block->wanted_nbytes);
    block->request->result.done_nbytes += block->wanted_nbytes;
    retire_block(engine, block);
}

static void make_ready(nvs_engine *engine, struct block *block)
{
    const nvs_transfer *transfer = &block->request->transfer;
    char *memory = block->bounced ? block->bounce : block->memory;
    block->op.fd = transfer->file->fd;
    block->op.direction = transfer->direction;
    block->op.memory = memory + block->done_nbytes;
    block->op.offset_bytes = block->offset_bytes + block->done_nbytes;
    block->op.nbytes = block->length_nbytes - block->done_nbytes;
    uint32_t tail = (engine->ready_head + engine->ready_count) % engine->queue_depth;
    engine->ready[tail] = &block->op;
    engine->ready_count++;
}

static void retry_block(nvs_engine *engine, struct block *block)
{
    count(engine, RETRIES, 1);
    make_ready(engine, block);
}

/* What O_DIRECT would refuse passes through memory of ours, padded up to the alignment. */
static bool set_up_bounce(nvs_engine *engine, struct block *block)
{
    const nvs_file *file = block->request->transfer.file;
    uint32_t alignment_nbytes = file->offset_alignment_nbytes;
    block->length_nbytes = block->wanted_nbytes;
    block->bounced = file->direct
                     && ((uintptr_t)block->memory % file->memory_alignment_nbytes != 0
                         || block->wanted_nbytes % alignment_nbytes != 0);
    if (!block->bounced)
        return true;
    if (!block->bounce
        && posix_memalign((void **)&block->bounce, BOUNCE_ALIGNMENT_NBYTES, engine->block_nbytes) != 0) {
        block->bounce = NULL;
        return false;
    }
    block->length_nbytes = (uint32_t)round_up(block->wanted_nbytes, alignment_nbytes);
    if (block->request->transfer.direction == NVS_WRITE) {
        memcpy(block->bounce, block->memory, block->wanted_nbytes);
        memset(block->bounce + block->wanted_nbytes, 0, block->length_nbytes - block->wanted_nbytes);
    }
    count(engine, BOUNCED, block->wanted_nbytes);
    return true;
}

/* Of a long last block of odd length only the tail is worth a copy: the rest goes in place. */
static bool ends_in_a_tail(const nvs_file *file, const char *memory, uint32_t nbytes)
{
    return file->direct && nbytes > TAIL_CUT_NBYTES && nbytes % file->offset_alignment_nbytes != 0
           && (uintptr_t)memory % file->memory_alignment_nbytes == 0;
}

/* Where registered pieces of memory meet, blocks are cut too, unless that misaligns the next. */
static uint32_t next_nbytes(const nvs_engine *engine, const nvs_request *request, const char *memory,
                            uint64_t most_nbytes)
{
    uint32_t nbytes =
        split_next_nbytes(request->transfer.nbytes, request->cut_nbytes, most_nbytes);
    uint32_t alignment_nbytes = request->transfer.file->offset_alignment_nbytes;
    if (ends_in_a_tail(request->transfer.file, memory, nbytes))
        nbytes = (uint32_t)round_down(nbytes, alignment_nbytes);
    uint32_t span_nbytes = (uint32_t)memory_table_span(&engine->memory_table, memory, nbytes);
    return span_nbytes % alignment_nbytes == 0 ? span_nbytes : nbytes;
}

static void cut_block(nvs_engine *engine, struct lane *lane, uint64_t most_nbytes)
{
    nvs_request *request = lane->head;
    const nvs_transfer *transfer = &request->transfer;
    struct block *block = engine->free_blocks[--engine->free_count];
    block->request = request;
    block->memory = (char *)transfer->memory + request->cut_nbytes;
    block->offset_bytes = transfer->offset_bytes + request->cut_nbytes;
    block->wanted_nbytes = next_nbytes(engine, request, block->memory, most_nbytes);
    block->done_nbytes = 0;
    block->tries = 0;
    request->cut_nbytes += block->wanted_nbytes;
    request->in_flight_count++;
    lane->in_flight_nbytes += block->wanted_nbytes;
    if (request->lane == NVS_DEMAND)
        lane_note_demand(engine);
    if (request->cut_nbytes == transfer->nbytes) {
        lane_remove(lane, request);
        request->queued = false;
    }
    count(engine, BLOCKS, 1);
    if (set_up_bounce(engine, block))
        make_ready(engine, block);
    else
        fail_block(engine, block, -ENOMEM);
}

static struct block *block_of(nvs_engine *engine, const struct backend_op *op)
{
    return &engine->blocks[op->slot];
}

static struct block *pop_ready(nvs_engine *engine)
{
    struct block *block = block_of(engine, engine->ready[engine->ready_head]);
    engine->ready_head = (engine->ready_head + 1) % engine->queue_depth;
    engine->ready_count--;
    return block;
}

/* How many of the oldest ready blocks lie side by side in the ring, up to a batch. */
static uint32_t batch_count(const nvs_engine *engine)
{
    uint32_t batch = engine->queue_depth - engine->ready_head;
    if (batch > engine->ready_count)
        batch = engine->ready_count;
    return batch < SUBMIT_BATCH ? batch : SUBMIT_BATCH;
}

/* A backend that is busy will take more once something completes. If nothing is in flight, nothing
 * will, so tries are counted then, and the next reap is a pause. */
static void refuse_batch(nvs_engine *engine, int rc)
{
    bool busy = rc == -EAGAIN || rc == -EINTR;
    struct block *block = block_of(engine, engine->ready[engine->ready_head]);
    engine->paused = busy;
    if (busy && (engine->in_backend_count > 0 || block->tries < TRY_LIMIT)) {
        count(engine, RETRIES, 1);
        if (engine->in_backend_count == 0)
            block->tries++;
        return;
    }
    block->tries++;
    fail_block(engine, pop_ready(engine), rc);
}

/* Past its tags the device's queue makes the submitting call wait, io_uring's too, and no demand
 * could be served meanwhile. Of the batch, how many blocks there are tags for. */
static uint32_t tagged_count(nvs_engine *engine, struct backend_op **ops, uint32_t batch)
{
    uint32_t in_use = engine->tags_in_use;
    uint32_t tagged = 0;
    for (; tagged < batch; tagged++) {
        struct block *block = block_of(engine, ops[tagged]);
        const nvs_file *file = block->request->transfer.file;
        block->tag_count = 0;
        if (file->tag_count == 0)
            continue;
        block->tag_count = (block->op.nbytes + file->tag_limit_nbytes - 1) / file->tag_limit_nbytes;
        bool alone = engine->in_backend_count + tagged == 0;
        if (in_use + block->tag_count > file->tag_count && !alone)
            break;
        in_use += block->tag_count;
    }
    return tagged;
}

static void prepare_op(nvs_engine *engine, struct backend_op *op)
{
    struct block *block = block_of(engine, op);
    nvs_file *file = block->request->transfer.file;
    block->direct = file->direct;
    op->memory_index = memory_table_find(&engine->memory_table, op->memory, op->nbytes);
    op->file_index = file_table_index(engine, file);
}

/* False when the backend, or the device behind it, takes no more for now. */
static bool submit_ready(nvs_engine *engine)
{
    while (engine->ready_count > 0 && !engine->paused) {
        struct backend_op **ops = &engine->ready[engine->ready_head];
        uint32_t batch = tagged_count(engine, ops, batch_count(engine));
        if (batch == 0)
            return false;
        for (uint32_t i = 0; i < batch; i++)
            prepare_op(engine, ops[i]);
        int taken = engine->backend->submit(engine->backend_state, ops, batch);
        assert(taken != 0 && taken <= (int)batch);
        if (taken < 0)
            refuse_batch(engine, taken);
        for (int i = 0; i < taken; i++) {
            struct block *block = pop_ready(engine);
            block->tries++;
            engine->tags_in_use += block->tag_count;
            engine->in_backend_count++;
        }
    }
    return !engine->paused;
}

/* Batch by batch, so that copying into bounce buffers overlaps with the disk's work. */
void start_blocks(nvs_engine *engine)
{
    struct lane *lane;
    do {
        uint64_t most_nbytes;
        lane = NULL;
        while (engine->ready_count < SUBMIT_BATCH && engine->free_count > 0
               && (lane = lane_choose(engine, &most_nbytes)))
            cut_block(engine, lane, most_nbytes);
    } while (submit_ready(engine) && lane && engine->free_count > 0);
}

static void count_moved(nvs_engine *engine, const struct block *block)
{
    enum counter which = block->op.direction == NVS_READ
                             ? (block->direct ? READ_DIRECT : READ_BUFFERED)
                             : (block->direct ? WRITE_DIRECT : WRITE_BUFFERED);
    count(engine, which, (uint64_t)block->op.result);
}

static int stuck_status(const struct block *block)
{
    struct stat facts;
    if (block->op.direction == NVS_READ && fstat(block->op.fd, &facts) == 0
        && (uint64_t)facts.st_size < block->offset_bytes + block->wanted_nbytes)
        return NVS_ERROR_END_OF_FILE;
    return NVS_ERROR_NO_PROGRESS;
}

static void judge_error(nvs_engine *engine, struct block *block, int status)
{
    nvs_file *file = block->request->transfer.file;
    bool again = status == -EAGAIN || status == -EINTR;
    if (again && block->tries < TRY_LIMIT) {
        engine->paused = true;
        retry_block(engine, block);
    } else if (status == -EINVAL && block->direct && file->direct_mode == NVS_DIRECT_PREFER) {
        /* The block was aligned, so it is direct I/O itself that the filesystem refuses, although it
         * let the file be opened with it (an overlay over a filesystem without, for one). */
        if (file->direct)
            file_fall_back(file, EINVAL);
        retry_block(engine, block);
    } else {
        fail_block(engine, block, status);
    }
}

static void judge_block(nvs_engine *engine, struct block *block)
{
    if (block->op.result < 0) {
        judge_error(engine, block, (int)block->op.result);
        return;
    }
    assert((uint64_t)block->op.result <= block->length_nbytes - block->done_nbytes);
    count_moved(engine, block);
    /* A read may stop at the end of the file, as long as that lies in the padding. */
    uint32_t needed_nbytes =
        block->op.direction == NVS_READ ? block->wanted_nbytes : block->length_nbytes;
    uint32_t alignment_nbytes =
        block->direct ? block->request->transfer.file->offset_alignment_nbytes : 1;
    switch (split_progress(&block->done_nbytes, (uint64_t)block->op.result, needed_nbytes,
                           alignment_nbytes)) {
    case SPLIT_FINISHED:
        finish_block(engine, block);
        break;
    case SPLIT_RESUME:
        block->tries = 0;
        retry_block(engine, block);
        break;
    case SPLIT_STUCK:
        fail_block(engine, block, stuck_status(block));
        break;
    }
}

void reap_complete(nvs_engine *engine)
{
    int64_t timeout_ns = engine->paused && engine->ready_count > 0 ? PAUSE_NS : -1;
    engine->paused = false;
    struct backend_op *complete[REAP_BATCH];
    int taken = engine->backend->reap(engine->backend_state, complete, REAP_BATCH, timeout_ns);
    for (int i = 0; i < taken; i++) {
        struct block *block = block_of(engine, complete[i]);
        engine->in_backend_count--;
        engine->tags_in_use -= block->tag_count;
        judge_block(engine, block);
    }
}
