/* Faults by script, over another backend, for tests through the same interface as production.
 *
 * The script's language stands in fault_script.h. Nothing is undone at close: the core drains first,
 * so what never completes must be let go by injecting another script, or close times out, as it does
 * over a drive that has died. */
#define _GNU_SOURCE
#include "backend.h"
#include "event.h"
#include "fault_script.h"
#include "split.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const int64_t NEVER_NS = INT64_MAX;
static const int64_t LOOK_AGAIN_NS = 1000000;
/* Direct transfers of which a part is moved end at multiples of the first, which every drive takes;
 * none counts in less than the second. */
enum { DIRECT_NBYTES = 4096, SECTOR_NBYTES = 512, SPOILT = 0xDB };

/* What an op that was taken still has to meet. */
struct fault_slot {
    struct backend_op *delayed; /* not yet given to the inner backend, until due_ns */
    int64_t due_ns;
    uint32_t generation;        /* of the script that delayed it */
    bool flip;
    uint32_t claimed_nbytes;    /* what a shortened op says it has moved; 0: the truth */
    struct backend_op *held;    /* complete, but late_count others are to be handed back first */
    uint32_t late_count;
};

struct fault {
    const struct backend *inner;
    void *inner_state;
    uint32_t queue_depth;
    uint32_t taken_count;  /* ops that the core waits for */
    int refusal;           /* of the op after the last one taken; told at the next submit */
    struct op_queue done;  /* to be handed back */
    struct fault_slot *slots;
    pthread_mutex_t lock;  /* guards the script, which any thread may replace */
    struct fault_script script;
};

static bool next_fate(struct fault *fault, const struct backend_op *op, struct fate *fate)
{
    pthread_mutex_lock(&fault->lock);
    bool found = fault_script_next(&fault->script, op->direction, op->nbytes, fate);
    pthread_mutex_unlock(&fault->lock);
    return found;
}

static void uncount(struct fault *fault, int direction)
{
    pthread_mutex_lock(&fault->lock);
    fault_script_uncount(&fault->script, direction);
    pthread_mutex_unlock(&fault->lock);
}

static int fault_open(void **state, struct backend_options *options)
{
    struct fault *fault = calloc(1, sizeof *fault);
    struct fault_slot *slots = calloc(options->queue_depth, sizeof *slots);
    int rc = fault && slots ? fault_script_parse(options->fault_script, &fault->script) : -ENOMEM;
    if (rc == -EINVAL)
        snprintf(options->reason, options->reason_nbytes, "fault script not understood: %s",
                 options->fault_script);
    if (rc == 0)
        rc = options->inner->open(&fault->inner_state, options);
    if (rc < 0) {
        free(fault);
        free(slots);
        return rc;
    }
    fault->inner = options->inner;
    fault->queue_depth = options->queue_depth;
    fault->slots = slots;
    op_queue_init(&fault->done);
    pthread_mutex_init(&fault->lock, NULL);
    *state = fault;
    return 0;
}

/* --- on the way in ----------------------------------------------------------------------------- */

static void shorten(struct backend_op *op, uint32_t nbytes)
{
    uint32_t left_nbytes = op->nbytes = nbytes;
    op->vector_count = 0;
    while (left_nbytes > 0) {
        struct iovec *vector = &op->vectors[op->vector_count++];
        if (vector->iov_len > left_nbytes)
            vector->iov_len = left_nbytes;
        left_nbytes -= (uint32_t)vector->iov_len;
    }
}

/* A direct file would refuse an odd length. Of a read more is moved then, and made unreadable later.
 * Of a write less: what is claimed beyond is no whole sector, so the core must come back for it. */
static void shorten_claiming(struct fault_slot *slot, struct backend_op *op, uint64_t claimed_nbytes)
{
    bool direct = fcntl(op->fd, F_GETFL) & O_DIRECT;
    uint64_t moved_nbytes = claimed_nbytes;
    if (direct && op->direction == NVS_READ) {
        moved_nbytes = round_up(claimed_nbytes, DIRECT_NBYTES);
    } else if (direct) {
        moved_nbytes = round_down(claimed_nbytes, DIRECT_NBYTES);
        if (claimed_nbytes >= moved_nbytes + SECTOR_NBYTES)
            claimed_nbytes = moved_nbytes + SECTOR_NBYTES - 1;
    }
    if (moved_nbytes < op->nbytes)
        shorten(op, (uint32_t)moved_nbytes);
    slot->claimed_nbytes = (uint32_t)claimed_nbytes;
}

/* What a shortened read has moved beyond its claim is as if it had not been. */
static void spoil(struct backend_op *op, uint64_t begin)
{
    for (uint32_t i = 0; i < op->vector_count; i++) {
        const struct iovec *vector = &op->vectors[i];
        if (begin < vector->iov_len)
            memset((char *)vector->iov_base + begin, SPOILT, vector->iov_len - begin);
        begin -= begin < vector->iov_len ? begin : vector->iov_len;
    }
}

/* The result of a shortened op, which may be shorter by itself. */
static void claim(const struct fault_slot *slot, struct backend_op *op)
{
    bool is_read = op->direction == NVS_READ;
    if (is_read ? op->result <= slot->claimed_nbytes : op->result != op->nbytes)
        return;
    if (is_read)
        spoil(op, slot->claimed_nbytes);
    op->result = slot->claimed_nbytes;
}

/* Hands it back; one that is held because of it may follow. */
static void tell(struct fault *fault, struct backend_op *op)
{
    op_queue_push(&fault->done, op);
    for (uint32_t i = 0; i < fault->queue_depth; i++) {
        struct fault_slot *slot = &fault->slots[i];
        if (slot->held && --slot->late_count == 0) {
            op_queue_push(&fault->done, slot->held);
            slot->held = NULL;
        }
    }
}

static int end_at_once(struct fault *fault, struct backend_op *op, int64_t result)
{
    op->result = result;
    tell(fault, op);
    return 0;
}

static int give(struct fault *fault, struct backend_op *op)
{
    if (op->nbytes == 0)
        return end_at_once(fault, op, fault->slots[op->slot].claimed_nbytes);
    int taken = fault->inner->submit(fault->inner_state, &op, 1);
    if (taken < 0)
        uncount(fault, op->direction);
    return taken < 0 ? taken : 0;
}

/* 0 when taken, else the refusal. */
static int submit_one(struct fault *fault, struct backend_op *op)
{
    struct fault_slot *slot = &fault->slots[op->slot];
    *slot = (struct fault_slot){0};
    struct fate fate;
    if (!next_fate(fault, op, &fate))
        return give(fault, op);
    switch (fate.action) {
    case FAULT_BUSY:
        return -EAGAIN;
    case FAULT_REFUSE:
        return -(int)fate.number;
    case FAULT_ERRNO:
        return end_at_once(fault, op, -(int64_t)fate.number);
    case FAULT_NEVER:
    case FAULT_DELAY:
        slot->delayed = op;
        slot->generation = fate.generation;
        slot->due_ns = fate.action == FAULT_NEVER ? NEVER_NS : monotonic_ns() + fate.delay_ns;
        return 0;
    case FAULT_SHORT:
        if (fate.number < op->nbytes)
            shorten_claiming(slot, op, fate.number);
        break;
    case FAULT_LATE:
        slot->late_count = (uint32_t)fate.number;
        break;
    case FAULT_FLIP:
        slot->flip = true;
        break;
    case FAULT_ACTION_COUNT:
        break;
    }
    return give(fault, op);
}

/* What is refused after others were taken is refused at the next call, as kernels do. */
static int fault_submit(void *state, struct backend_op **ops, uint32_t count)
{
    struct fault *fault = state;
    uint32_t taken_count = 0;
    int refusal = fault->refusal;
    while (refusal == 0 && taken_count < count)
        if ((refusal = submit_one(fault, ops[taken_count])) == 0)
            taken_count++;
    fault->refusal = taken_count > 0 ? refusal : 0;
    fault->taken_count += taken_count;
    return taken_count > 0 ? (int)taken_count : refusal;
}

/* --- on the way out ---------------------------------------------------------------------------- */

static void finish(struct fault *fault, struct backend_op *op)
{
    struct fault_slot *slot = &fault->slots[op->slot];
    if (slot->flip && op->direction == NVS_READ && op->result > 0)
        *(char *)op->vectors[0].iov_base ^= 1;
    if (slot->claimed_nbytes > 0)
        claim(slot, op);
    if (slot->late_count > 0)
        slot->held = op;
    else
        tell(fault, op);
}

/* When nobody is left to overtake the ones held, the one that is nearest goes. */
static void let_go(struct fault *fault)
{
    if (fault->done.head)
        return;
    uint32_t coming_count = fault->taken_count;
    struct fault_slot *nearest = NULL;
    for (uint32_t i = 0; i < fault->queue_depth; i++) {
        struct fault_slot *slot = &fault->slots[i];
        coming_count -= slot->held || (slot->delayed && slot->due_ns == NEVER_NS);
        if (slot->held && (!nearest || slot->late_count < nearest->late_count))
            nearest = slot;
    }
    if (coming_count > 0 || !nearest)
        return;
    struct backend_op *op = nearest->held;
    nearest->held = NULL;
    tell(fault, op);
}

/* Is it over for now: taken by the inner backend, or refused for good? */
static bool start(struct fault *fault, struct fault_slot *slot)
{
    int taken = fault->inner->submit(fault->inner_state, &slot->delayed, 1);
    if (taken == -EAGAIN || taken == -EINTR)
        return false;
    struct backend_op *op = slot->delayed;
    slot->delayed = NULL;
    if (taken < 0)
        end_at_once(fault, op, taken);
    return true;
}

/* Starts what is due; returns the time until the next one is, or the timeout if that is less. */
static int64_t start_delayed(struct fault *fault, int64_t timeout_ns)
{
    pthread_mutex_lock(&fault->lock);
    uint32_t generation = fault->script.generation;
    pthread_mutex_unlock(&fault->lock);
    int64_t now_ns = monotonic_ns();
    for (uint32_t i = 0; i < fault->queue_depth; i++) {
        struct fault_slot *slot = &fault->slots[i];
        if (!slot->delayed)
            continue;
        if (slot->generation != generation && slot->due_ns == NEVER_NS)
            slot->due_ns = now_ns;
        if (slot->due_ns <= now_ns && start(fault, slot))
            continue;
        /* A release, or an inner backend that is busy, is noticed by looking again soon. */
        bool look_again = slot->due_ns <= now_ns || slot->due_ns == NEVER_NS;
        int64_t left_ns = look_again ? LOOK_AGAIN_NS : slot->due_ns - now_ns;
        if (timeout_ns < 0 || left_ns < timeout_ns)
            timeout_ns = left_ns;
    }
    return timeout_ns;
}

static int fault_reap(void *state, struct backend_op **done, uint32_t capacity, int64_t timeout_ns)
{
    struct fault *fault = state;
    timeout_ns = start_delayed(fault, timeout_ns);
    let_go(fault);
    if (fault->done.head)
        timeout_ns = 0;
    int arrived_count = fault->inner->reap(fault->inner_state, done, capacity, timeout_ns);
    for (int i = 0; i < arrived_count; i++)
        finish(fault, done[i]);
    let_go(fault);
    uint32_t count = 0;
    while (count < capacity && (done[count] = op_queue_pop(&fault->done)))
        count++;
    fault->taken_count -= count;
    return (int)count;
}

static void fault_close(void *state)
{
    struct fault *fault = state;
    fault->inner->close(fault->inner_state);
    pthread_mutex_destroy(&fault->lock);
    free(fault->slots);
    free(fault);
}

static int fault_inject(void *state, const char *fault_script)
{
    struct fault *fault = state;
    struct fault_script script;
    int rc = fault_script_parse(fault_script, &script);
    if (rc == 0) {
        pthread_mutex_lock(&fault->lock);
        script.generation = fault->script.generation + 1;
        fault->script = script;
        pthread_mutex_unlock(&fault->lock);
    }
    return rc;
}

static int fault_register_memory(void *state, void *memory, uint64_t nbytes)
{
    struct fault *fault = state;
    return fault->inner->register_memory
               ? fault->inner->register_memory(fault->inner_state, memory, nbytes) : -EOPNOTSUPP;
}

static void fault_unregister_memory(void *state, int index)
{
    struct fault *fault = state;
    fault->inner->unregister_memory(fault->inner_state, index);
}

static int fault_register_file(void *state, int fd)
{
    struct fault *fault = state;
    return fault->inner->register_file ? fault->inner->register_file(fault->inner_state, fd)
                                       : -EOPNOTSUPP;
}

static void fault_unregister_file(void *state, int index)
{
    struct fault *fault = state;
    fault->inner->unregister_file(fault->inner_state, index);
}

static void fault_report(void *state, struct device_report *report)
{
    struct fault *fault = state;
    if (fault->inner->report)
        fault->inner->report(fault->inner_state, report);
}

static const struct backend fault_backend = {
    .abi = BACKEND_ABI,
    .name = "fault",
    .open = fault_open,
    .submit = fault_submit,
    .reap = fault_reap,
    .close = fault_close,
    .register_memory = fault_register_memory,
    .unregister_memory = fault_unregister_memory,
    .register_file = fault_register_file,
    .unregister_file = fault_unregister_file,
    .report = fault_report,
    .inject = fault_inject,
};

static __attribute__((constructor)) void fault_register(void)
{
    backend_register(&fault_backend);
}
