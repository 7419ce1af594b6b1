#ifndef NVS_REGISTRATION_H
#define NVS_REGISTRATION_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "backend.h"

/* What the backend knows beforehand: pieces of memory, pinned once instead of at each transfer, and
 * open files. Both are optional: whatever could not be registered is moved all the same. */

struct memory_piece {
    char *memory;
    uint64_t nbytes;
    int index; /* the backend's */
};

/* The I/O thread's. */
struct memory_table {
    struct memory_piece *pieces;
    uint32_t piece_count;
    uint32_t last_found;
    uint64_t piece_nbytes; /* largest to try */
};

/* Shared by the engine and the files in it, because any of them may go first: a file tells here that
 * it is gone, so that the I/O thread lets go of its descriptor too. */
struct file_table {
    atomic_int references;
    pid_t pid;
    atomic_bool any_gone;
    pthread_mutex_t lock; /* guards what follows */
    int wake_fd;          /* the engine's, or -1 once it is closed */
    bool gone[FILE_TABLE_LIMIT];
};

struct nvs_engine;
struct member;

/* A call of nvs_engine_[un]register_memory, in the mailbox. */
struct memory_call;
void memory_calls_serve(struct nvs_engine *engine, struct memory_call *calls);

/* The index of the piece that holds all of it, or -1. */
int memory_table_find(struct memory_table *table, const char *memory, uint64_t nbytes);

/* How far from `memory` the next border of a piece lies, at most nbytes. */
uint64_t memory_table_span(const struct memory_table *table, const char *memory, uint64_t nbytes);

/* NULL when memory is short. */
struct file_table *file_table_new(int wake_fd);
void file_table_close(struct file_table *table);

/* The member's index, registering it if there is room, or -1. */
int file_table_index(struct nvs_engine *engine, struct member *member);

/* By whichever thread drops the last reference to the member's file. */
void file_table_leave(struct file_table *table, int index);

/* By the I/O thread, directly before it empties the mailbox. */
void file_table_sweep(struct nvs_engine *engine);

#endif
