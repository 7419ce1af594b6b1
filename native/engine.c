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
    nvs_request *cancels = engine->cancels;
    engine->cancels = NULL;
    struct memory_call *memory_calls = engine->memory_calls;
    engine->memory_calls = NULL;
    bool stopping = engine->stopping;
    eventfd_t ignored;
    if (engine->woken)
        eventfd_read(engine->wake_fd, &ignored);
    engine->woken = false;
    pthread_mutex_unlock(&engine->mailbox_lock);
    memory_calls_serve(engine, memory_calls);
    while (cancels) {
        nvs_request *request = cancels;
        cancels = request->next_cancel;
        request_stop(engine, request, NVS_ERROR_CANCELLED);
        nvs_request_release(request);
    }
    return stopping;
}

/* A lane may be left while no block is in work: when the last one was refused for good by a backend
 * that is busy, which the next has to wait for. */
static bool is_drained(const nvs_engine *engine)
{
    bool is_queued = false;
    for (int lane = 0; lane < NVS_LANE_COUNT; lane++)
        is_queued |= engine->lanes[lane].head != NULL;
    return !is_queued && engine->free_count == engine->queue_depth;
}

static void *engine_thread(void *argument)
{
    nvs_engine *engine = argument;
    /* Some backends' handles belong to the thread that opens them. */
    engine->open_status = engine->backend->open(&engine->backend_state, &engine->backend_options);
    bool is_open = engine->open_status == 0;
    if (is_open)
        engine->free_count = engine->depth_limit = engine->queue_depth =
            engine->backend_options.queue_depth;
    engine->counters[QUEUE_DEPTH] = engine->queue_depth;
    event_set(&engine->opened);
    engine->file_limit = engine->backend->register_file ? FILE_TABLE_LIMIT : 0;
    while (is_open) {
        file_table_sweep(engine);
        bool stopping = take_mailbox(engine);
        start_blocks(engine);
        if (stopping && is_drained(engine))
            break;
        /* Taking the mailbox may have swallowed the wake-up of a file that has gone since the sweep. */
        if (!engine->file_table->any_gone)
            reap_complete(engine);
    }
    if (is_open) {
        take_mailbox(engine); /* a request that ended at submission may have been cancelled since */
        engine->backend->close(engine->backend_state);
    }
    event_set(&engine->drained);
    return NULL;
}

/* --- opening and closing ----------------------------------------------------------------------- */

static void engine_free(nvs_engine *engine)
{
    if (engine->blocks)
        for (uint32_t i = 0; i < engine->queue_depth; i++) {
            free(engine->blocks[i].spans);
            free(engine->blocks[i].vectors);
            free(engine->blocks[i].bounce);
        }
    if (engine->file_table)
        file_table_close(engine->file_table);
    if (engine->wake_fd >= 0)
        close(engine->wake_fd);
    free(engine->memory_table.pieces);
    pthread_mutex_destroy(&engine->mailbox_lock);
    free(engine->gap_memory);
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
    engine->memory_is_of_device = engine->backend && engine->backend->memory_is_of_device;
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

int nvs_engine_submit(nvs_engine *engine, nvs_file *file, int32_t direction, int32_t lane,
                      const nvs_piece *pieces, size_t piece_count, nvs_request **request)
{
    if (engine->pid != getpid())
        return NVS_ERROR_FORKED;
    nvs_request *made = request_new(file, direction, lane, pieces, piece_count);
    if (!made)
        return -ENOMEM;
    bool moves = made->queued; /* the I/O thread's once it is posted */
    pthread_mutex_lock(&engine->mailbox_lock);
    bool accepted = !engine->stopping;
    if (accepted && moves) {
        count(engine, IN_FLIGHT, 1);
        lane_append(&engine->mailbox[lane], &(struct lane){made, made, 0});
        engine_wake(engine);
    }
    pthread_mutex_unlock(&engine->mailbox_lock);
    if (!accepted) {
        request_discard(made);
        return NVS_ERROR_CLOSED;
    }
    count(engine, REQUESTS, 1);
    if (!moves)
        request_finish(made);
    *request = made;
    return 0;
}

int nvs_engine_cancel(nvs_engine *engine, nvs_request *request)
{
    if (engine->pid != getpid())
        return NVS_ERROR_FORKED;
    pthread_mutex_lock(&engine->mailbox_lock);
    if (!engine->stopping && !request->cancel_posted && !atomic_load(&request->finished)) {
        request->cancel_posted = true;
        atomic_fetch_add(&request->references, 1);
        request->next_cancel = engine->cancels;
        engine->cancels = request;
        engine_wake(engine);
    }
    pthread_mutex_unlock(&engine->mailbox_lock);
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
