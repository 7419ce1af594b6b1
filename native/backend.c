#define _GNU_SOURCE
#include "backend.h"

#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { BACKEND_LIMIT = 16 };
static const struct backend *backends[BACKEND_LIMIT];
static int backend_count;

void backend_register(const struct backend *backend)
{
    if (backend_count < BACKEND_LIMIT)
        backends[backend_count++] = backend;
}

static const char *missing_hook(const struct backend *backend)
{
    return !backend->open ? "open" : !backend->submit ? "submit" : !backend->reap ? "reap"
         : !backend->close ? "close"
         : backend->register_memory && !backend->unregister_memory ? "unregister_memory"
         : backend->register_file && !backend->unregister_file ? "unregister_file" : NULL;
}

const struct backend *backend_choose(const char *name, char *reason, size_t reason_nbytes)
{
    for (int i = 0; i < backend_count; i++) {
        const struct backend *backend = backends[i];
        if (strcmp(backend->name, name) != 0)
            continue;
        if (backend->abi != BACKEND_ABI) {
            snprintf(reason, reason_nbytes, "backend %s speaks ABI %u, the engine %u", name,
                     backend->abi, BACKEND_ABI);
            return NULL;
        }
        if (missing_hook(backend)) {
            snprintf(reason, reason_nbytes, "backend %s lacks the required hook '%s'", name,
                     missing_hook(backend));
            return NULL;
        }
        return backend;
    }
    int used = snprintf(reason, reason_nbytes, "no backend '%s'; there are", name);
    for (int i = 0; i < backend_count && used < (int)reason_nbytes; i++)
        used += snprintf(reason + used, reason_nbytes - (size_t)used, " %s", backends[i]->name);
    return NULL;
}

void op_queue_init(struct op_queue *queue)
{
    queue->head = NULL;
    queue->tail = &queue->head;
}

void op_queue_push(struct op_queue *queue, struct backend_op *op)
{
    op->next = NULL;
    *queue->tail = op;
    queue->tail = &op->next;
}

struct backend_op *op_queue_pop(struct op_queue *queue)
{
    struct backend_op *op = queue->head;
    if (op) {
        queue->head = op->next;
        if (!queue->head)
            queue->tail = &queue->head;
    }
    return op;
}

void wait_readable(int first_fd, int second_fd, int64_t timeout_ns)
{
    struct pollfd fds[2] = {{.fd = first_fd, .events = POLLIN}, {.fd = second_fd, .events = POLLIN}};
    struct timespec timeout = {timeout_ns / 1000000000, timeout_ns % 1000000000};
    ppoll(fds, second_fd < 0 ? 1 : 2, timeout_ns < 0 ? NULL : &timeout, NULL);
}
