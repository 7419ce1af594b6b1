/* The I/O thread's work: submit blocks, judge what comes back.
 *
 * A block is in one of three places: the stack of free ones, the ready ring, or the backend. It
 * leaves its request only when it is finished or has failed for good, and a request is finished when
 * it has no block left: so nothing lands in memory that its owner has got back. */
#define _GNU_SOURCE
#include "engine.h"
#include "split.h"

#include <assert.h>
#include <errno.h>
#include <sys/stat.h>

/* Small blocks go to the kernel a few at a time, so that the disk starts before the queue is full:
 * +10 to 24 % at 4 KiB on one virtual disk. */
enum { SUBMIT_BATCH = 8 };
/* Few, so that copies out of bounce buffers do not let the kernel's queue run dry. */
enum { REAP_BATCH = 8 };
/* Tries of one block without progress. Arbitrary; with the pause between tries at least 0.1 s when
 * nothing else completes. */
enum { TRY_LIMIT = 100 };
/* Blocks that must come back for the depth to be raised by one, after EAGAIN lowered it. Arbitrary. */
enum { DEPTH_CREDIT = 16 };
static const int64_t PAUSE_NS = 1000000;

void settle_request(nvs_engine *engine, nvs_request *request)
{
    if (request->in_flight_count > 0 || request->queued)
        return;
    count(engine, ERRORS, request->failure_count);
    count(engine, IN_FLIGHT, (uint64_t)-1);
    request->finished_ns = monotonic_ns();
    count_latency(engine, request->lane, request->finished_ns - request->submitted_ns);
    request_finish(request);
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

static void make_ready(nvs_engine *engine, struct block *block)
{
    aim_block(block);
    uint32_t tail = (engine->ready_head + engine->ready_count) % engine->queue_depth;
    engine->ready[tail] = &block->op;
    engine->ready_count++;
}

static void retry_block(nvs_engine *engine, struct block *block)
{
    count(engine, RETRIES, 1);
    make_ready(engine, block);
}

/* After spans were closed or failed: what is left of the block, if anything, goes on. */
static void go_on(nvs_engine *engine, struct block *block)
{
    block->tries = 0;
    if (block->span_at == block->span_count)
        retire_block(engine, block);
    else
        make_ready(engine, block);
}

static void fail_block(nvs_engine *engine, struct block *block, int status)
{
    if (!block->careful && is_shared(block))
        block->careful = true;
    else
        fail_piece(engine, block, status);
    go_on(engine, block);
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

/* A shortage that may be over at the next try. */
static bool is_passing(int status)
{
    return status == -EAGAIN || status == -EINTR || status == -EBUSY;
}

/* The kernel is short of something. What is in its hands now is what it can bear. */
static void lower_depth(nvs_engine *engine)
{
    engine->depth_limit = engine->in_backend_count > 1 ? engine->in_backend_count : 1;
    engine->depth_credit = 0;
}

static void raise_depth(nvs_engine *engine)
{
    if (engine->depth_limit == engine->queue_depth || ++engine->depth_credit < DEPTH_CREDIT)
        return;
    engine->depth_limit++;
    engine->depth_credit = 0;
}

/* A backend that is busy will take more once something completes. If nothing is in flight, nothing
 * will, so tries are counted then, and the next reap is a pause. */
static void refuse_batch(nvs_engine *engine, int rc)
{
    bool busy = is_passing(rc);
    struct block *block = block_of(engine, engine->ready[engine->ready_head]);
    engine->paused = busy;
    if (rc == -EAGAIN)
        lower_depth(engine);
    if (busy && (engine->in_backend_count > 0 || block->tries < TRY_LIMIT)) {
        count(engine, RETRIES, 1);
        if (engine->in_backend_count == 0)
            block->tries++;
        return;
    }
    block->tries++;
    fail_block(engine, pop_ready(engine), rc);
}

static struct device_use *use_of_device(nvs_engine *engine, dev_t device)
{
    for (uint32_t i = 0; i < engine->device_count; i++)
        if (engine->devices[i].device == device)
            return &engine->devices[i];
    if (engine->device_count < DEVICE_LIMIT)
        engine->devices[engine->device_count++].device = device;
    return &engine->devices[engine->device_count - 1];
}

static bool take_tags(nvs_engine *engine, struct block *block)
{
    const struct member *member = block->member;
    block->device_use = NULL;
    if (member->tag_count == 0)
        return true;
    struct device_use *use = use_of_device(engine, member->device);
    uint32_t count = (block->op.nbytes + member->tag_limit_nbytes - 1) / member->tag_limit_nbytes;
    bool alone = use->tag_count == 0;
    if (use->tag_count + count > member->tag_count && !alone)
        return false;
    use->tag_count += count;
    block->device_use = use;
    block->tag_count = count;
    return true;
}

static void return_tags(struct block *block)
{
    if (block->device_use)
        block->device_use->tag_count -= block->tag_count;
}

/* Past its tags a device's queue makes the submitting call wait, io_uring's too, and no demand
 * could be served meanwhile. Of the batch, how many blocks there are tags for; they are taken. */
static uint32_t tagged_count(nvs_engine *engine, struct backend_op **ops, uint32_t batch)
{
    uint32_t tagged = 0;
    while (tagged < batch && take_tags(engine, block_of(engine, ops[tagged])))
        tagged++;
    return tagged;
}

static int find_memory_index(nvs_engine *engine, const struct backend_op *op)
{
    struct memory_table *table = &engine->memory_table;
    int index = memory_table_find(table, op->vectors[0].iov_base, op->vectors[0].iov_len);
    for (uint32_t i = 1; i < op->vector_count && index >= 0; i++)
        if (memory_table_find(table, op->vectors[i].iov_base, op->vectors[i].iov_len) != index)
            index = -1;
    return index;
}

static void prepare_op(nvs_engine *engine, struct backend_op *op)
{
    struct block *block = block_of(engine, op);
    block->direct = block->member->direct;
    op->fd = block->member->fd;
    op->direction = block->request->direction;
    op->memory_index = find_memory_index(engine, op);
    op->file_index = file_table_index(engine, block->member);
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
        for (uint32_t i = taken < 0 ? 0 : (uint32_t)taken; i < batch; i++)
            return_tags(block_of(engine, ops[i]));
        if (taken < 0)
            refuse_batch(engine, taken);
        for (int i = 0; i < taken; i++) {
            struct block *block = pop_ready(engine);
            block->tries++;
            engine->in_backend_count++;
        }
    }
    return !engine->paused;
}

static bool has_room(const nvs_engine *engine)
{
    return engine->free_count > 0 && engine->queue_depth - engine->free_count < engine->depth_limit;
}

/* Batch by batch, so that copying into bounce buffers overlaps with the disk's work. Goes on while
 * anything can be cut: blocks that the backend refuses are over at once, and nothing would wake the
 * thread for what waits behind them. */
void start_blocks(nvs_engine *engine)
{
    uint64_t most_nbytes;
    do {
        struct lane *lane;
        while (engine->ready_count < SUBMIT_BATCH && has_room(engine)
               && (lane = lane_choose(engine, &most_nbytes)))
            if (cut_block(engine, lane, most_nbytes))
                make_ready(engine, engine->free_blocks[engine->free_count]);
    } while (submit_ready(engine) && has_room(engine) && lane_choose(engine, &most_nbytes));
}

static void count_moved(nvs_engine *engine, const struct block *block)
{
    enum counter which = block->op.direction == NVS_READ
                             ? (block->direct ? READ_DIRECT : READ_BUFFERED)
                             : (block->direct ? WRITE_DIRECT : WRITE_BUFFERED);
    count(engine, which, (uint64_t)block->op.result);
}

/* What is padding does not count: a file may end within it. */
static int stuck_status(const struct block *block)
{
    uint64_t wanted_end = block->member_offset_bytes + block->aim_nbytes - block->aim_padding_nbytes;
    struct stat facts;
    if (block->op.direction == NVS_READ && fstat(block->op.fd, &facts) == 0
        && (uint64_t)facts.st_size < wanted_end)
        return NVS_ERROR_END_OF_FILE;
    return NVS_ERROR_NO_PROGRESS;
}

static void judge_error(nvs_engine *engine, struct block *block, int status)
{
    struct member *member = block->member;
    bool again = is_passing(status);
    if (again && block->tries < TRY_LIMIT) {
        engine->paused = true;
        if (status == -EAGAIN)
            lower_depth(engine);
        retry_block(engine, block);
    } else if (status == -EINVAL && block->direct && member->direct_mode == NVS_DIRECT_PREFER) {
        /* The block was aligned, so it is direct I/O itself that the filesystem refuses, although it
         * let the file be opened with it (an overlay over a filesystem without, for one). */
        if (member->direct)
            member_fall_back(member, EINVAL);
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
    assert((uint64_t)block->op.result <= block->aim_nbytes - block->done_nbytes);
    count_moved(engine, block);
    /* A read may stop at the end of the file, as long as that lies in the padding. */
    bool is_read = block->op.direction == NVS_READ;
    uint32_t needed_nbytes = block->aim_nbytes - (is_read ? block->aim_padding_nbytes : 0);
    uint32_t alignment_nbytes = block->direct ? block->request->file->offset_alignment_nbytes : 1;
    enum split_verdict verdict = split_progress(&block->done_nbytes, (uint64_t)block->op.result,
                                                needed_nbytes, alignment_nbytes);
    close_spans(block);
    if (verdict == SPLIT_STUCK) {
        fail_block(engine, block, stuck_status(block));
        return;
    }
    if (verdict == SPLIT_RESUME)
        count(engine, RETRIES, 1);
    go_on(engine, block);
}

void reap_complete(nvs_engine *engine)
{
    /* Also when nothing is ready any more: what was refused for good leaves others to be cut. */
    int64_t timeout_ns = engine->paused ? PAUSE_NS : -1;
    engine->paused = false;
    struct backend_op *complete[REAP_BATCH];
    int taken = engine->backend->reap(engine->backend_state, complete, REAP_BATCH, timeout_ns);
    for (int i = 0; i < taken; i++) {
        struct block *block = block_of(engine, complete[i]);
        engine->in_backend_count--;
        return_tags(block);
        raise_depth(engine);
        judge_block(engine, block);
    }
}
