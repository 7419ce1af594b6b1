/* How an op on device memory is moved: by cuFile, or through page-locked memory. Parts of an op may lie
 * in host memory: gaps that are read over, and pieces of other callers' tensors. */
#define _GNU_SOURCE
#include "gds.h"
#include "workers.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

/* Of each thread: what a transfer passes through that cuFile does not move. Threads overlap reading
 * with copying, so more gains nothing. */
enum { BOUNCE_NBYTES = 1 << 20 };
/* cuFile moves other places in pieces, through memory of its own. */
enum { CUFILE_ALIGNMENT_NBYTES = 4096 };
static const int64_t REFUSED = INT64_MIN;

/* --- where an op's bytes lie -------------------------------------------------------------------- */

/* How far an op has been gone through. */
struct cursor {
    const struct backend_op *op;
    uint32_t vector;
    uint64_t at_bytes; /* in the vector */
};

/* Bytes that lie in one region (then it has a context), or in none. */
struct run {
    char *memory;
    uint64_t nbytes;
    char *base; /* what cuFile calls the memory */
    void *context;
    bool suits_cufile;
};

/* Under the lock. The region that holds the first byte, or NULL; *nbytes shrinks to the next border. */
static const struct region *find_region(struct gds *gds, const char *memory, uint64_t *nbytes)
{
    for (uint32_t i = 0; i < gds->region_count; i++) {
        const struct region *region = &gds->regions[i];
        uint64_t before = (uint64_t)((uintptr_t)memory - (uintptr_t)region->memory);
        uint64_t until = (uint64_t)((uintptr_t)region->memory - (uintptr_t)memory);
        if (!region->memory)
            continue;
        if (before < region->nbytes) {
            if (*nbytes > region->nbytes - before)
                *nbytes = region->nbytes - before;
            return region;
        }
        if (*nbytes > until)
            *nbytes = until;
    }
    return NULL;
}

static bool next_run(struct gds *gds, struct cursor *cursor, uint64_t most_nbytes, struct run *run)
{
    if (most_nbytes == 0 || cursor->vector == cursor->op->vector_count)
        return false;
    const struct iovec *vector = &cursor->op->vectors[cursor->vector];
    uint64_t left_nbytes = vector->iov_len - cursor->at_bytes;
    *run = (struct run){.memory = (char *)vector->iov_base + cursor->at_bytes,
                        .nbytes = left_nbytes < most_nbytes ? left_nbytes : most_nbytes};
    pthread_mutex_lock(&gds->lock);
    const struct region *region = find_region(gds, run->memory, &run->nbytes);
    if (region) {
        run->context = region->context;
        run->base = region->by_cufile ? region->memory : run->memory;
        run->suits_cufile = !is_mapped(region);
    }
    pthread_mutex_unlock(&gds->lock);
    cursor->at_bytes += run->nbytes;
    if (cursor->at_bytes == vector->iov_len) {
        cursor->vector++;
        cursor->at_bytes = 0;
    }
    return true;
}

/* The context of the first device memory in it, or NULL: all is in host memory. */
static void *context_of(struct gds *gds, const struct backend_op *op, bool *suits_cufile)
{
    struct cursor cursor = {.op = op};
    struct run run;
    void *context = NULL;
    *suits_cufile = true;
    while (gds->region_count > 0 && next_run(gds, &cursor, UINT64_MAX, &run)) {
        if (!run.context)
            continue;
        context = context ? context : run.context;
        *suits_cufile &= run.suits_cufile
                         && ((uintptr_t)run.memory | run.nbytes) % CUFILE_ALIGNMENT_NBYTES == 0;
    }
    return context;
}

/* --- a thread and CUDA -------------------------------------------------------------------------- */

static int fail(struct gds *gds, const char *call, int code)
{
    gds_fail(gds, call, code);
    return -EFAULT;
}

/* Waits for what is under way on the thread's stream. */
static int finish_copies(struct gds *gds, struct gds_worker *worker)
{
    int code = worker->stream ? gds->cuda->stream_synchronize(worker->stream) : 0;
    return code == 0 ? 0 : fail(gds, "cuStreamSynchronize", code);
}

static void drop_stream(struct gds *gds, struct gds_worker *worker)
{
    if (worker->stream)
        gds->cuda->stream_destroy(worker->stream);
    worker->stream = NULL;
}

static int enter_context(struct gds *gds, struct gds_worker *worker, void *context)
{
    if (worker->context == context)
        return 0;
    int rc = finish_copies(gds, worker);
    drop_stream(gds, worker);
    int code = gds->cuda->set_context(context);
    worker->context = code == 0 ? context : NULL;
    return code == 0 ? rc : fail(gds, "cuCtxSetCurrent", code);
}

void gds_worker_close(struct gds *gds, struct gds_worker *worker)
{
    if (!worker->context || gds->cuda->set_context(worker->context) != 0)
        return;
    drop_stream(gds, worker);
    if (worker->bounce)
        gds->cuda->host_free(worker->bounce);
}

/* In the current context. */
static int need_bounce(struct gds *gds, struct gds_worker *worker)
{
    int code = 0;
    if (!worker->bounce)
        code = gds->cuda->host_allocate((void **)&worker->bounce, BOUNCE_NBYTES,
                                        CUDA_HOST_PORTABLE);
    if (code != 0) {
        worker->bounce = NULL;
        return fail(gds, "cuMemHostAlloc", code);
    }
    if (!worker->stream)
        code = gds->cuda->stream_create(&worker->stream, CUDA_STREAM_NON_BLOCKING);
    if (code != 0) {
        worker->stream = NULL;
        return fail(gds, "cuStreamCreate", code);
    }
    return 0;
}

/* --- through page-locked memory ----------------------------------------------------------------- */

static int copy_run(struct gds *gds, struct gds_worker *worker, const struct run *run, char *bounce,
                    int direction)
{
    if (!run->context) {
        if (direction == NVS_READ)
            memcpy(run->memory, bounce, run->nbytes);
        else
            memcpy(bounce, run->memory, run->nbytes);
        return 0;
    }
    int rc = enter_context(gds, worker, run->context);
    if (rc == 0)
        rc = need_bounce(gds, worker);
    if (rc < 0)
        return rc;
    uint64_t device = (uint64_t)(uintptr_t)run->memory;
    int code = direction == NVS_READ
                   ? gds->cuda->copy_to_device(device, bounce, run->nbytes, worker->stream)
                   : gds->cuda->copy_to_host(bounce, device, run->nbytes, worker->stream);
    atomic_fetch_add(&gds->bounced_nbytes, run->nbytes);
    return code == 0 ? 0 : fail(gds, "a copy to or from the device", code);
}

/* Copies between the bounce memory and the next bytes of the op. */
static int copy_bounced(struct gds *gds, struct gds_worker *worker, struct cursor *cursor,
                        uint64_t nbytes)
{
    char *bounce = worker->bounce;
    struct run run;
    int rc = 0;
    while (rc == 0 && next_run(gds, cursor, nbytes, &run)) {
        rc = copy_run(gds, worker, &run, bounce, cursor->op->direction);
        bounce += run.nbytes;
        nbytes -= run.nbytes;
    }
    /* Also after a failure: what was started may still be under way. */
    int finish_rc = finish_copies(gds, worker);
    return rc < 0 ? rc : finish_rc;
}

static ssize_t move_plain(const struct backend_op *op, char *memory, uint64_t nbytes, uint64_t at)
{
    off_t offset_bytes = (off_t)(op->offset_bytes + at);
    ssize_t moved = op->direction == NVS_READ ? pread(op->fd, memory, nbytes, offset_bytes)
                                              : pwrite(op->fd, memory, nbytes, offset_bytes);
    return moved < 0 ? -errno : moved;
}

static int64_t move_bounced(struct gds *gds, struct gds_worker *worker, const struct backend_op *op)
{
    struct cursor cursor = {.op = op};
    uint64_t moved_nbytes = 0;
    int64_t rc = need_bounce(gds, worker);
    while (rc >= 0 && moved_nbytes < op->nbytes) {
        uint64_t left_nbytes = op->nbytes - moved_nbytes;
        uint64_t nbytes = left_nbytes < BOUNCE_NBYTES ? left_nbytes : BOUNCE_NBYTES;
        int64_t moved = 0;
        if (op->direction == NVS_WRITE)
            rc = copy_bounced(gds, worker, &cursor, nbytes);
        if (rc >= 0)
            rc = moved = move_plain(op, worker->bounce, nbytes, moved_nbytes);
        if (rc > 0 && op->direction == NVS_READ)
            rc = copy_bounced(gds, worker, &cursor, (uint64_t)moved);
        if (rc >= 0)
            moved_nbytes += (uint64_t)moved;
        if ((uint64_t)moved < nbytes)
            break;
    }
    /* After some progress the failure, if it lasts, is told of the next try. */
    return moved_nbytes > 0 || rc >= 0 ? (int64_t)moved_nbytes : rc;
}

/* --- by cuFile ---------------------------------------------------------------------------------- */

/* The file's handle, or NULL. */
static void *file_handle(struct gds *gds, int index)
{
    if (index < 0)
        return NULL;
    pthread_mutex_lock(&gds->lock);
    struct gds_file *file = &gds->files[index];
    if (!file->handle) {
        struct cufile_descriptor descriptor = {.type = CUFILE_OPAQUE_FD, .file.fd = file->fd};
        struct cufile_error error = gds->cufile->register_handle(&file->handle, &descriptor);
        if (error.code != 0) {
            file->handle = NULL;
            gds_refuse(gds, "cuFileHandleRegister failed with %d (CUresult %d)", error.code,
                   error.cuda_code);
        }
    }
    void *handle = file->handle;
    pthread_mutex_unlock(&gds->lock);
    return handle;
}

static bool is_of_drive(int code)
{
    return code == EIO || code == ENOSPC || code == EDQUOT || code == EINTR;
}

static int64_t move_run_by_cufile(struct gds *gds, const struct backend_op *op, void *handle,
                                  const struct run *run, uint64_t at)
{
    off_t file_offset = (off_t)(op->offset_bytes + at), memory_offset = run->memory - run->base;
    bool is_read = op->direction == NVS_READ;
    errno = 0;
    ssize_t moved =
        is_read ? gds->cufile->read(handle, run->base, run->nbytes, file_offset, memory_offset)
                : gds->cufile->write(handle, run->base, run->nbytes, file_offset, memory_offset);
    int code = errno;
    if (moved == -1 && is_of_drive(code))
        return -code;
    if (moved >= 0 && (uint64_t)moved <= run->nbytes) {
        atomic_fetch_add(&gds->cufile_nbytes, (uint64_t)moved);
        return moved;
    }
    const char *name = is_read ? "cuFileRead" : "cuFileWrite";
    if (moved == -1)
        gds_refuse(gds, "%s failed with %s", name, strerror(code));
    else
        gds_refuse(gds, "%s answered %zd to %llu bytes", name, moved, (unsigned long long)run->nbytes);
    return REFUSED;
}

/* What was moved before a refusal is moved again by whoever falls back. */
static int64_t move_by_cufile(struct gds *gds, struct gds_worker *worker,
                              const struct backend_op *op, void *handle)
{
    struct cursor cursor = {.op = op};
    struct run run;
    uint64_t moved_nbytes = 0;
    while (next_run(gds, &cursor, UINT64_MAX, &run)) {
        int64_t moved = run.context ? enter_context(gds, worker, run.context) : 0;
        if (moved == 0)
            moved = run.context ? move_run_by_cufile(gds, op, handle, &run, moved_nbytes)
                                : move_plain(op, run.memory, run.nbytes, moved_nbytes);
        if (moved == REFUSED || (moved < 0 && moved_nbytes == 0))
            return moved;
        moved_nbytes += moved > 0 ? (uint64_t)moved : 0;
        if (moved < (int64_t)run.nbytes)
            break;
    }
    return (int64_t)moved_nbytes;
}

void gds_move(void *context, uint32_t number, struct backend_op *op)
{
    struct gds *gds = context;
    struct gds_worker *worker = &gds->states[number];
    bool suits_cufile;
    void *device_context = context_of(gds, op, &suits_cufile);
    if (!device_context) {
        move_by_kernel(op);
        return;
    }
    op->result = enter_context(gds, worker, device_context);
    if (op->result < 0)
        return;
    void *handle = suits_cufile && !gds->refused ? file_handle(gds, op->file_index) : NULL;
    op->result = handle ? move_by_cufile(gds, worker, op, handle) : REFUSED;
    if (op->result == REFUSED)
        op->result = move_bounced(gds, worker, op);
}
