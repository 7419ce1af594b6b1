#ifndef NVS_GDS_H
#define NVS_GDS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "backend.h"
#include "cuda_library.h"

/* Of the backend gds: backend_gds.c has the hooks, gds_move.c what its threads do. */

/* Registered device memory. */
struct region {
    char *memory; /* NULL: not in use */
    uint64_t nbytes;
    void *context;
    int primary_device; /* whose primary context was retained for it, or -1; see is_mapped */
    bool by_cufile;     /* registered there; if not, cuFile moves it all the same */
};

/* Mapped piece by piece, as torch's expandable segments: it belongs to no context, and cuFile 1.15
 * ends the process by an assertion when it is given such memory. */
static inline bool is_mapped(const struct region *region)
{
    return region->primary_device >= 0;
}

struct gds_file {
    int fd;       /* ours: the caller may close its own before cuFile has let go; -1: not in use */
    void *handle; /* cuFile's, from the first op on device memory on */
};

/* One thread's. */
struct gds_worker {
    void *context; /* the current one, which the stream belongs to */
    void *stream;
    char *bounce; /* page-locked */
};

struct gds {
    struct workers *workers;
    uint32_t worker_count;
    const struct cuda_library *cuda;
    const struct cufile_library *cufile; /* from the first device memory on */
    atomic_bool refusing;                /* somebody writes the refusal */
    atomic_bool refused;                 /* it is written, and cuFile is not asked any more */
    char refusal[DEVICE_REFUSAL_NBYTES];
    atomic_bool failing, failed; /* likewise of CUDA itself; then `failure` tells both */
    char failure[2 * DEVICE_REFUSAL_NBYTES];
    atomic_uint_fast64_t cufile_nbytes;
    atomic_uint_fast64_t bounced_nbytes;
    atomic_uint region_count; /* of slots that have been in use */
    pthread_mutex_t lock;     /* guards what follows */
    struct region regions[MEMORY_PIECE_LIMIT];
    struct gds_file files[FILE_TABLE_LIMIT];
    struct gds_worker states[]; /* worker_count of them */
};

/* The first refusal is kept, and ends the use of cuFile. Any thread. */
__attribute__((format(printf, 2, 3))) void gds_refuse(struct gds *gds, const char *format, ...);

/* A failure of CUDA itself, which leaves nothing to fall back to. The first is kept. Any thread. */
void gds_fail(struct gds *gds, const char *call, int code);

/* A workers_move; `context` is the struct gds. */
void gds_move(void *context, uint32_t number, struct backend_op *op);

/* Ends what the thread of that number has made on the GPU; by the I/O thread, after the threads. */
void gds_worker_close(struct gds *gds, struct gds_worker *worker);

#endif
