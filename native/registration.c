/* Registered memory and files: what is tried, remembered and undone.
 *
 * Facts (kernel 6.18, docs/design.md): a piece is at most 1 GiB (EFAULT above). One transfer must lie
 * in one piece. Pieces count against RLIMIT_MEMLOCK unless the process has CAP_IPC_LOCK, whole 2 MiB
 * pages at a time; past it the answer is ENOMEM. A registered file stays open until it is taken out
 * of the table, even after close(). */
#define _GNU_SOURCE
#include "engine.h"
#include "split.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

static const uint64_t LARGEST_PIECE_NBYTES = 1ULL << 30;
static const uint64_t SMALLEST_PIECE_NBYTES = 2ULL << 20; /* a huge page: less is not worth an entry */

struct memory_call {
    char *memory;
    uint64_t nbytes;
    bool adding;
    uint64_t registered_nbytes;
    event done;
    struct memory_call *next;
};

/* --- memory, on the I/O thread ----------------------------------------------------------------- */

static int add_piece(nvs_engine *engine, char *memory, uint64_t nbytes)
{
    struct memory_table *table = &engine->memory_table;
    if (!table->pieces)
        table->pieces = calloc(MEMORY_PIECE_LIMIT, sizeof *table->pieces);
    if (!table->pieces || table->piece_count == MEMORY_PIECE_LIMIT)
        return -ENOSPC;
    int index = engine->backend->register_memory(engine->backend_state, memory, nbytes);
    if (index >= 0) {
        table->pieces[table->piece_count++] = (struct memory_piece){memory, nbytes, index};
        count(engine, REGISTERED, nbytes);
    }
    return index;
}

/* In pieces as large as the memlock limit lets through: try, halve, remember. */
static uint64_t add_memory(nvs_engine *engine, char *memory, uint64_t nbytes)
{
    struct memory_table *table = &engine->memory_table;
    if (table->piece_nbytes == 0)
        table->piece_nbytes = LARGEST_PIECE_NBYTES;
    uint64_t done_nbytes = 0;
    while (engine->backend->register_memory && done_nbytes < nbytes) {
        uint64_t left_nbytes = nbytes - done_nbytes;
        uint64_t piece_nbytes = left_nbytes < table->piece_nbytes ? left_nbytes : table->piece_nbytes;
        int index = add_piece(engine, memory + done_nbytes, piece_nbytes);
        if (index >= 0) {
            done_nbytes += piece_nbytes;
            continue;
        }
        if (index != -ENOMEM || piece_nbytes <= SMALLEST_PIECE_NBYTES)
            break;
        table->piece_nbytes = round_up(piece_nbytes / 2, SMALLEST_PIECE_NBYTES);
        if (table->piece_nbytes == piece_nbytes)
            table->piece_nbytes = SMALLEST_PIECE_NBYTES;
    }
    return done_nbytes;
}

static void remove_memory(nvs_engine *engine, const char *memory, uint64_t nbytes)
{
    struct memory_table *table = &engine->memory_table;
    uint32_t kept_count = 0;
    for (uint32_t i = 0; i < table->piece_count; i++) {
        struct memory_piece *piece = &table->pieces[i];
        if (piece->memory >= memory && piece->memory + piece->nbytes <= memory + nbytes) {
            engine->backend->unregister_memory(engine->backend_state, piece->index);
            count(engine, REGISTERED, -piece->nbytes);
        } else {
            table->pieces[kept_count++] = *piece;
        }
    }
    table->piece_count = kept_count;
    table->last_found = 0;
    table->piece_nbytes = LARGEST_PIECE_NBYTES; /* there is room again */
}

void memory_calls_serve(nvs_engine *engine, struct memory_call *calls)
{
    while (calls) {
        struct memory_call *call = calls;
        calls = call->next;
        if (call->adding)
            call->registered_nbytes = add_memory(engine, call->memory, call->nbytes);
        else
            remove_memory(engine, call->memory, call->nbytes);
        event_set(&call->done); /* the caller's from here on */
    }
}

static bool piece_holds(const struct memory_piece *piece, const char *memory, uint64_t nbytes)
{
    return memory >= piece->memory && memory + nbytes <= piece->memory + piece->nbytes;
}

int memory_table_find(struct memory_table *table, const char *memory, uint64_t nbytes)
{
    /* Blocks come in order, so the piece is nearly always the last one's. */
    for (uint32_t i = 0; i < table->piece_count; i++) {
        uint32_t at = (table->last_found + i) % table->piece_count;
        if (piece_holds(&table->pieces[at], memory, nbytes)) {
            table->last_found = at;
            return table->pieces[at].index;
        }
    }
    return -1;
}

uint64_t memory_table_span(const struct memory_table *table, const char *memory, uint64_t nbytes)
{
    if (table->piece_count > 0 && piece_holds(&table->pieces[table->last_found], memory, nbytes))
        return nbytes;
    uint64_t span_nbytes = nbytes;
    for (uint32_t i = 0; i < table->piece_count; i++) {
        const char *borders[] = {table->pieces[i].memory,
                                 table->pieces[i].memory + table->pieces[i].nbytes};
        for (int end = 0; end < 2; end++)
            if (borders[end] > memory && (uint64_t)(borders[end] - memory) < span_nbytes)
                span_nbytes = (uint64_t)(borders[end] - memory);
    }
    return span_nbytes;
}

/* --- memory, by callers ------------------------------------------------------------------------ */

/* Waits for the I/O thread's turn, which is never far: it sleeps nowhere but in reap. */
static int make_call(nvs_engine *engine, struct memory_call *call)
{
    if (engine->pid != getpid())
        return NVS_ERROR_FORKED;
    pthread_mutex_lock(&engine->mailbox_lock);
    bool accepted = !engine->stopping;
    if (accepted) {
        call->next = engine->memory_calls;
        engine->memory_calls = call;
        engine_wake(engine);
    }
    pthread_mutex_unlock(&engine->mailbox_lock);
    while (accepted && event_wait(&call->done, -1) != 0)
        continue;
    return accepted ? 0 : NVS_ERROR_CLOSED;
}

int64_t nvs_engine_register_memory(nvs_engine *engine, void *memory, uint64_t nbytes)
{
    struct memory_call call = {.memory = memory, .nbytes = nbytes, .adding = true};
    int rc = make_call(engine, &call);
    return rc < 0 ? rc : (int64_t)call.registered_nbytes;
}

int nvs_engine_unregister_memory(nvs_engine *engine, void *memory, uint64_t nbytes)
{
    struct memory_call call = {.memory = memory, .nbytes = nbytes, .adding = false};
    return make_call(engine, &call);
}

/* --- files ------------------------------------------------------------------------------------- */

struct file_table *file_table_new(int wake_fd)
{
    struct file_table *table = calloc(1, sizeof *table);
    if (!table)
        return NULL;
    table->references = 1;
    table->pid = getpid();
    table->wake_fd = wake_fd;
    pthread_mutex_init(&table->lock, NULL);
    return table;
}

static void file_table_release(struct file_table *table)
{
    if (atomic_fetch_sub(&table->references, 1) == 1) {
        pthread_mutex_destroy(&table->lock);
        free(table);
    }
}

void file_table_close(struct file_table *table)
{
    pthread_mutex_lock(&table->lock);
    table->wake_fd = -1;
    pthread_mutex_unlock(&table->lock);
    file_table_release(table);
}

int file_table_index(nvs_engine *engine, struct member *member)
{
    struct file_table *owner = atomic_load(&member->table);
    if (owner)
        return owner == engine->file_table ? member->index : -1;
    if (engine->registered_file_count == engine->file_limit)
        return -1;
    if (!atomic_compare_exchange_strong(&member->table, &owner, engine->file_table))
        return -1; /* another engine was quicker */
    member->index = engine->backend->register_file(engine->backend_state, member->fd);
    if (member->index < 0) {
        atomic_store(&member->table, NULL);
        engine->file_limit = engine->registered_file_count;
        return -1;
    }
    atomic_fetch_add(&engine->file_table->references, 1);
    engine->registered_file_count++;
    return member->index;
}

void file_table_leave(struct file_table *table, int index)
{
    /* A forked child has neither the table's thread nor, perhaps, its lock. */
    if (table->pid != getpid())
        return;
    pthread_mutex_lock(&table->lock);
    table->gone[index] = true;
    table->any_gone = true;
    if (table->wake_fd >= 0)
        eventfd_write(table->wake_fd, 1);
    pthread_mutex_unlock(&table->lock);
    file_table_release(table);
}

void file_table_sweep(nvs_engine *engine)
{
    struct file_table *table = engine->file_table;
    if (!table->any_gone)
        return;
    pthread_mutex_lock(&table->lock);
    eventfd_t ignored;
    eventfd_read(table->wake_fd, &ignored);
    table->any_gone = false;
    for (int i = 0; i < FILE_TABLE_LIMIT; i++) {
        if (!table->gone[i])
            continue;
        table->gone[i] = false;
        engine->backend->unregister_file(engine->backend_state, i);
        engine->registered_file_count--;
    }
    pthread_mutex_unlock(&table->lock);
}
