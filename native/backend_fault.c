/* Faults by script, over another backend, for tests through the same interface as production.
 *
 * A script is rules separated by ';':
 *     <read|write|any> <n|*> <action> [number]
 * where n counts the blocks of that direction as they are submitted (retries included, from 1, since
 * the start or since the script was injected) and * is every one. The first rule that matches acts:
 *     short N    says that it moved N bytes only        errno N    completes with that error
 *     never      waits until another script is injected delay MS   is started that much later
 *     flip       a read comes back with one bit wrong   busy       is refused once with EAGAIN
 * Example: "read 3 short 4096; write 1 errno 28; read * delay 5". */
#define _GNU_SOURCE
#include "backend.h"
#include "event.h"
#include "split.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RULE_LIMIT = 32, ANY_DIRECTION = 2 };
enum action { SHORT, ERRNO, NEVER, DELAY, FLIP, BUSY, ACTION_COUNT };
static const char *const action_names[] = {"short", "errno", "never", "delay", "flip", "busy"};
static const bool action_takes_number[] = {true, true, false, true, false, false};

struct rule {
    int direction;
    uint64_t number; /* 0: every one */
    enum action action;
    uint64_t argument;
    uint32_t generation; /* the script's; filled in when it acts */
};

struct script {
    struct rule rules[RULE_LIMIT];
    int rule_count;
    uint64_t counts[2]; /* blocks seen, by direction */
    uint32_t generation; /* how many were injected before it */
};

struct fault_slot {
    struct backend_op *delayed; /* not yet given to the inner backend, until due_ns */
    int64_t due_ns;
    uint32_t generation; /* of the script that delayed it */
    bool flip;
    uint32_t claimed_nbytes; /* what a shortened op says it has moved; 0: the truth */
};

struct fault {
    const struct backend *inner;
    void *inner_state;
    uint32_t queue_depth;
    struct op_queue done; /* ended here, without the inner backend */
    struct fault_slot *slots;
    pthread_mutex_t lock; /* guards the script, which any thread may replace */
    struct script script;
};

static const int64_t NEVER_NS = INT64_MAX;

static bool parse_rule(char *text, struct rule *rule)
{
    char *rest = NULL;
    char *direction = strtok_r(text, " \t\n", &rest);
    char *number = strtok_r(NULL, " \t\n", &rest);
    char *action = strtok_r(NULL, " \t\n", &rest);
    char *argument = strtok_r(NULL, " \t\n", &rest);
    if (!direction || !number || !action || strtok_r(NULL, " \t\n", &rest))
        return false;
    rule->direction = !strcmp(direction, "read") ? 0 : !strcmp(direction, "write") ? 1
                    : !strcmp(direction, "any") ? ANY_DIRECTION : -1;
    rule->number = !strcmp(number, "*") ? 0 : strtoull(number, NULL, 10);
    int which = 0;
    while (which < ACTION_COUNT && strcmp(action_names[which], action) != 0)
        which++;
    if (rule->direction < 0 || which == ACTION_COUNT || (!rule->number && strcmp(number, "*") != 0))
        return false;
    rule->action = (enum action)which;
    rule->argument = argument ? strtoull(argument, NULL, 10) : 0;
    return action_takes_number[which] == (argument != NULL);
}

static int parse_script(const char *text, struct script *script)
{
    memset(script, 0, sizeof *script);
    char *copy = strdup(text ? text : "");
    if (!copy)
        return -ENOMEM;
    int rc = 0;
    char *rest = NULL;
    for (char *part = strtok_r(copy, ";", &rest); part; part = strtok_r(NULL, ";", &rest)) {
        if (part[strspn(part, " \t\n")] == '\0')
            continue;
        if (script->rule_count == RULE_LIMIT || !parse_rule(part, &script->rules[script->rule_count++]))
            rc = -EINVAL;
    }
    free(copy);
    return rc;
}

/* Counts the block and says which rule acts on it, if any. */
static bool match_rule(struct fault *fault, int direction, struct rule *matched)
{
    pthread_mutex_lock(&fault->lock);
    struct script *script = &fault->script;
    uint64_t number = ++script->counts[direction];
    bool found = false;
    for (int i = 0; i < script->rule_count && !found; i++) {
        const struct rule *rule = &script->rules[i];
        uint64_t seen = rule->direction == ANY_DIRECTION ? script->counts[0] + script->counts[1] : number;
        if ((rule->direction == ANY_DIRECTION || rule->direction == direction)
            && (rule->number == 0 || rule->number == seen)) {
            *matched = *rule;
            matched->generation = script->generation;
            found = true;
        }
    }
    pthread_mutex_unlock(&fault->lock);
    return found;
}

static void uncount(struct fault *fault, int direction)
{
    pthread_mutex_lock(&fault->lock);
    if (fault->script.counts[direction] > 0)
        fault->script.counts[direction]--;
    pthread_mutex_unlock(&fault->lock);
}

static int fault_open(void **state, struct backend_options *options)
{
    struct fault *fault = calloc(1, sizeof *fault);
    struct fault_slot *slots = calloc(options->queue_depth, sizeof *slots);
    int rc = fault && slots ? parse_script(options->fault_script, &fault->script) : -ENOMEM;
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

/* A direct file would refuse an odd length; the rest up to N is left unmoved, and since the core may
 * rely on aligned progress only, it must come back for it. */
static int submit_short(struct fault *fault, struct backend_op *op, uint64_t claimed_nbytes)
{
    if (claimed_nbytes < op->nbytes) {
        bool direct = fcntl(op->fd, F_GETFL) & O_DIRECT;
        shorten(op, (uint32_t)(direct ? round_down(claimed_nbytes, 4096) : claimed_nbytes));
        fault->slots[op->slot].claimed_nbytes = (uint32_t)claimed_nbytes;
    }
    if (op->nbytes > 0)
        return fault->inner->submit(fault->inner_state, &op, 1);
    fault->slots[op->slot].claimed_nbytes = 0;
    op->result = (int64_t)claimed_nbytes;
    op_queue_push(&fault->done, op);
    return 1;
}

/* 1 when taken, else the inner backend's refusal. */
static int submit_one(struct fault *fault, struct backend_op *op)
{
    struct rule rule;
    if (!match_rule(fault, op->direction, &rule)) {
        int taken = fault->inner->submit(fault->inner_state, &op, 1);
        if (taken < 0)
            uncount(fault, op->direction);
        return taken;
    }
    switch (rule.action) {
    case BUSY:
        return -EAGAIN;
    case ERRNO:
        op->result = -(int64_t)rule.argument;
        op_queue_push(&fault->done, op);
        return 1;
    case NEVER:
    case DELAY:
        fault->slots[op->slot].delayed = op;
        fault->slots[op->slot].generation = rule.generation;
        fault->slots[op->slot].due_ns = rule.action == NEVER ? NEVER_NS
                                      : monotonic_ns() + (int64_t)rule.argument * 1000000;
        return 1;
    case SHORT:
        return submit_short(fault, op, rule.argument);
    case FLIP:
        fault->slots[op->slot].flip = true;
        break;
    case ACTION_COUNT:
        break;
    }
    return fault->inner->submit(fault->inner_state, &op, 1);
}

static int fault_submit(void *state, struct backend_op **ops, uint32_t count)
{
    struct fault *fault = state;
    uint32_t taken = 0;
    while (taken < count) {
        int rc = submit_one(fault, ops[taken]);
        if (rc < 0)
            return taken > 0 ? (int)taken : rc;
        taken++;
    }
    return (int)taken;
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
        if (slot->due_ns <= now_ns && fault->inner->submit(fault->inner_state, &slot->delayed, 1) == 1) {
            slot->delayed = NULL;
            continue;
        }
        /* A release, or an inner backend that is busy, is noticed by looking again soon. */
        bool look_again = slot->due_ns <= now_ns || slot->due_ns == NEVER_NS;
        int64_t left_ns = look_again ? 1000000 : slot->due_ns - now_ns;
        if (timeout_ns < 0 || left_ns < timeout_ns)
            timeout_ns = left_ns;
    }
    return timeout_ns;
}

static int fault_reap(void *state, struct backend_op **done, uint32_t capacity, int64_t timeout_ns)
{
    struct fault *fault = state;
    uint32_t count = 0;
    while (count < capacity && (done[count] = op_queue_pop(&fault->done)))
        count++;
    timeout_ns = start_delayed(fault, timeout_ns);
    if (count == capacity)
        return (int)count;
    int inner_count = fault->inner->reap(fault->inner_state, done + count, capacity - count,
                                         count > 0 ? 0 : timeout_ns);
    for (int i = 0; i < inner_count; i++) {
        struct backend_op *op = done[count++];
        struct fault_slot *slot = &fault->slots[op->slot];
        if (slot->flip && op->direction == NVS_READ && op->result > 0)
            *(char *)op->vectors[0].iov_base ^= 1;
        if (slot->claimed_nbytes > 0 && op->result > 0)
            op->result = slot->claimed_nbytes;
        slot->flip = false;
        slot->claimed_nbytes = 0;
    }
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
    struct script script;
    int rc = parse_script(fault_script, &script);
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
    .inject = fault_inject,
};

static __attribute__((constructor)) void fault_register(void)
{
    backend_register(&fault_backend);
}
