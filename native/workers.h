#ifndef NVS_WORKERS_H
#define NVS_WORKERS_H

#include "backend.h"

/* Threads that move ops, each with calls that block: what the backends posix and gds are made of.
 * All calls by the engine's I/O thread. */

struct workers;

/* Moves an op and sets its result, on a thread of the workers: that of this number, below
 * options->thread_count. */
typedef void workers_move(void *context, uint32_t worker, struct backend_op *op);

/* As a backend's open, with options->thread_count threads of that name. */
int workers_open(struct workers **workers, struct backend_options *options, const char *name,
                 workers_move *move, void *context);

/* As a backend's hooks; `state` is the struct workers. */
int workers_submit(void *state, struct backend_op **ops, uint32_t count);
int workers_reap(void *state, struct backend_op **done, uint32_t capacity, int64_t timeout_ns);
void workers_close(void *state);

/* Moves the op with one system call, and sets its result. */
void move_by_kernel(struct backend_op *op);

#endif
