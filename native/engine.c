/* The engine: one I/O thread that owns the backend, and the mailbox through which callers reach it. */
#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* Under the mailbox lock. One write is enough until the I/O thread has looked. */
void engine_wake(nvs_engine *engine)
{
    if (!engine->woken)
        eventfd_write(engine->wake_fd, 1);
    engine->woken = true;
}

/* --- the I/O thread ---------------------------------------------------------------------------- */

/* Returns whether the engine is to stop once it has nothing left to do. */
static bool take_mailbox(nvs_engine *engine)
{
    pthread_mutex_lock(&engine->mailbox_lock);
    for (int lane = 0; lane < NVS_LANE_COUNT; lane++)
        lane_append(&engine->lanes[lane], &engine->mailbox[lane]);
    struct memory_call *memory_calls = engine->memory_calls;
    engine->memory_calls = NULL;
    bool stopping = engine->stopping;
    eventfd_t ignored;
    if (engine->woken)
        eventfd_read(engine->wake_fd, &ignored);
    engine->woken = false;
    pthread_mutex_unlock(&engine->mailbox_lock);
    memory_calls_serve(engine, memory_calls);
    return stopping;
}

static void *engine_thread(void *argument)
{
    nvs_engine *engine = argument;
    /* Some backends' handles belong to the thread that opens them. */
    engine->open_status = engine->backend->open(&engine->backend_state, &engine->backend_options);
    bool is_open = engine->open_status == 0;
    if (is_open)
        engine->free_count = engine->queue_depth = engine->backend_options.queue_depth;
    event_set(&engine->opened);
    engine->file_limit = engine->backend->register_file ? FILE_TABLE_LIMIT : 0;
    while (is_open) {
        file_table_sweep(engine);
        bool stopping = take_mailbox(engine);
        start_blocks(engine);
        if (stopping && engine->free_count == engine->queue_depth)
            break;
        reap_complete(engine);
    }
    if (is_open)
        engine->backend->close(engine->backend_state);
    event_set(&engine->drained);
    return NULL;
}

/* --- opening and closing ----------------------------------------------------------------------- */

static void engine_free(nvs_engine *engine)
{
    if (engine->blocks)
        for (uint32_t i = 0; i < engine->queue_depth; i++)
            free(engine->blocks[i].bounce);
    if (engine->file_table)
        file_table_close(engine->file_table);
    if (engine->wake_fd >= 0)
        close(engine->wake_fd);
    free(engine->memory_table.pieces);
    pthread_mutex_destroy(&engine->mailbox_lock);
    free(engine->blocks);
    free(engine->free_blocks);
    free(engine->ready);
    free(engine);
}

static nvs_engine *engine_new(const nvs_options *options)
{
    nvs_engine *engine = calloc(1, sizeof *engine);
    if (!engine)
        return NULL;
    uint32_t depth = options->queue_depth;
    engine->pid = getpid();
    engine->block_nbytes = options->block_nbytes;
    engine->background_nbytes = options->background_nbytes;
    engine->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_init(&engine->mailbox_lock, NULL);
    engine->blocks = calloc(depth, sizeof *engine->blocks);
    engine->free_blocks = calloc(depth, sizeof *engine->free_blocks);
    engine->ready = calloc(depth, sizeof *engine->ready);
    engine->file_table = file_table_new(engine->wake_fd);
    if (engine->wake_fd < 0 || !engine->blocks || !engine->free_blocks || !engine->ready
        || !engine->file_table) {
        engine_free(engine);
        return NULL;
    }
    for (uint32_t i = 0; i < depth; i++) {
        engine->blocks[i].op.slot = i;
        engine->free_blocks[i] = &engine->blocks[i];
    }
    engine->queue_depth = depth;
    return engine;
}

/* With a script the backend is wrapped; "fault" alone is aio, wrapped. */
static int choose_backend(nvs_engine *engine, const nvs_options *options, char *reason,
                          size_t reason_nbytes)
{
    bool is_fault = strcmp(options->backend, "fault") == 0;
    engine->backend = backend_choose(is_fault ? "aio" : options->backend, reason, reason_nbytes);
    engine->backend_options = (struct backend_options){
        .queue_depth = options->queue_depth,
        .thread_count = options->thread_count,
        .wake_fd = engine->wake_fd,
        .fault_script = options->fault_script,
        .reason = reason,
        .reason_nbytes = reason_nbytes,
    };
    if (engine->backend && (is_fault || options->fault_script)) {
        engine->backend_options.inner = engine->backend;
        engine->backend = backend_choose("fault", reason, reason_nbytes);
    }
    return engine->backend ? 0 : -EINVAL;
}

/* The thread takes no signals: they are the caller's, and interrupt nothing here. */
static int start_thread(nvs_engine *engine)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(&engine->thread, NULL, engine_thread, engine);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc != 0)
        return -rc;
    pthread_setname_np(engine->thread, "nvmeswap-io");
    while (event_wait(&engine->opened, -1) != 0)
        continue;
    if (engine->open_status < 0)
        pthread_join(engine->thread, NULL);
    return engine->open_status;
}

nvs_engine *nvs_engine_open(const nvs_options *options, int32_t *status, char *reason,
                            size_t reason_nbytes)
{
    reason[0] = '\0';
    nvs_engine *engine = engine_new(options);
    if (!engine) {
        *status = errno == EMFILE || errno == ENFILE ? -errno : -ENOMEM;
        snprintf(reason, reason_nbytes, "setting up the engine: %s", strerror(-*status));
        return NULL;
    }
    *status = choose_backend(engine, options, reason, reason_nbytes);
    if (*status == 0)
        *status = start_thread(engine);
    if (*status == 0) {
        /* The caller's memory, not to be touched after this call. */
        engine->backend_options.reason = NULL;
        engine->backend_options.fault_script = NULL;
        return engine;
    }
    if (reason[0] == '\0')
        snprintf(reason, reason_nbytes, "%s: %s", options->backend, strerror(-*status));
    engine_free(engine);
    return NULL;
}

int nvs_engine_close(nvs_engine *engine, int64_t timeout_ns)
{
    if (engine->pid != getpid())
        return NVS_ERROR_FORKED;
    pthread_mutex_lock(&engine->mailbox_lock);
    engine->stopping = true;
    engine_wake(engine);
    pthread_mutex_unlock(&engine->mailbox_lock);
    int rc = event_wait(&engine->drained, timeout_ns);
    if (rc < 0)
        return rc;
    pthread_join(engine->thread, NULL);
    engine_free(engine);
    return 0;
}

/* --- calls while open -------------------------------------------------------------------------- */

static void discard_requests(nvs_request **requests, size_t request_count)
{
    for (size_t i = 0; i < request_count; i++) {
        nvs_file_release(requests[i]->transfer.file);
        free(requests[i]);
    }
}

static bool make_requests(const nvs_transfer *transfers, size_t transfer_count,
                          nvs_request **requests)
{
    for (size_t i = 0; i < transfer_count; i++) {
        requests[i] = request_new(&transfers[i]);
        if (!requests[i]) {
            discard_requests(requests, i);
            return false;
        }
    }
    return true;
}

/* False when the engine accepts nothing any more. */
static bool post(nvs_engine *engine, struct lane *batch, int lane, uint64_t request_count)
{
    pthread_mutex_lock(&engine->mailbox_lock);
    bool accepted = !engine->stopping;
    if (accepted && batch->head) {
        count(engine, IN_FLIGHT, request_count);
        lane_append(&engine->mailbox[lane], batch);
        engine_wake(engine);
    }
    pthread_mutex_unlock(&engine->mailbox_lock);
    return accepted;
}

int nvs_engine_submit(nvs_engine *engine, const nvs_transfer *transfers, size_t transfer_count,
                      int32_t lane, nvs_request **requests)
{
    if (engine->pid != getpid())
        return NVS_ERROR_FORKED;
    if (!make_requests(transfers, transfer_count, requests))
        return -ENOMEM;
    for (size_t i = 0; i < transfer_count; i++)
        requests[i]->lane = lane;
    struct lane batch = {NULL, NULL, 0};
    uint64_t queued_count = lane_fill(&batch, requests, transfer_count);
    if (!post(engine, &batch, lane, queued_count)) {
        discard_requests(requests, transfer_count);
        return NVS_ERROR_CLOSED;
    }
    count(engine, REQUESTS, transfer_count);
    for (size_t i = 0; i < transfer_count; i++)
        if (transfers[i].nbytes == 0)
            request_finish(requests[i]);
    return 0;
}

int nvs_engine_stats(nvs_engine *engine, nvs_stats *stats)
{
    if (engine->pid != getpid())
        return NVS_ERROR_FORKED;
    uint64_t values[COUNTER_COUNT];
    for (int i = 0; i < COUNTER_COUNT; i++)
        values[i] = atomic_load_explicit(&engine->counters[i], memory_order_relaxed);
    _Static_assert(sizeof values == sizeof *stats, "a counter for every field, in the same order");
    memcpy(stats, values, sizeof *stats);
    return 0;
}

int nvs_engine_inject(nvs_engine *engine, const char *fault_script)
{
    if (engine->pid != getpid())
        return NVS_ERROR_FORKED;
    if (!engine->backend->inject)
        return -ENOTSUP;
    return engine->backend->inject(engine->backend_state, fault_script);
}
