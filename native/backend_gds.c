/* Threads that move device memory by cuFile (GPUDirect Storage), and host memory as posix does: so
 * one engine serves both, in one order.
 *
 * Whatever cuFile refuses is moved through page-locked memory instead, the op that met the refusal
 * included; from then on cuFile is not asked any more, and the first refusal is kept. Only what the
 * drive itself says (EIO, ENOSPC) is the op's end. */
#define _GNU_SOURCE
#include "gds.h"
#include "workers.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

void gds_refuse(struct gds *gds, const char *format, ...)
{
    if (atomic_exchange(&gds->refusing, true))
        return;
    va_list values;
    va_start(values, format);
    vsnprintf(gds->refusal, sizeof gds->refusal, format, values);
    va_end(values);
    atomic_store(&gds->refused, true);
}

void gds_fail(struct gds *gds, const char *call, int code)
{
    if (atomic_exchange(&gds->failing, true))
        return;
    bool refused = atomic_load(&gds->refused);
    snprintf(gds->failure, sizeof gds->failure, "%s%s%s failed with CUresult %d",
             refused ? gds->refusal : "", refused ? "; then " : "", call, code);
    gds_refuse(gds, "%s failed with CUresult %d", call, code);
    atomic_store(&gds->failed, true);
}

static void gds_free(struct gds *gds)
{
    pthread_mutex_destroy(&gds->lock);
    free(gds);
}

static int gds_open(void **state, struct backend_options *options)
{
    const struct cuda_library *cuda = cuda_library_load(options->reason, options->reason_nbytes);
    if (!cuda)
        return -ENODEV;
    struct gds *gds = calloc(1, sizeof *gds + options->thread_count * sizeof *gds->states);
    if (!gds)
        return -ENOMEM;
    gds->cuda = cuda;
    gds->worker_count = options->thread_count;
    pthread_mutex_init(&gds->lock, NULL);
    for (int i = 0; i < FILE_TABLE_LIMIT; i++)
        gds->files[i].fd = -1;
    int rc = workers_open(&gds->workers, options, "nvmeswap-gds", gds_move, gds);
    if (rc < 0) {
        gds_free(gds);
        return rc;
    }
    *state = gds;
    return 0;
}

static int gds_submit(void *state, struct backend_op **ops, uint32_t count)
{
    return workers_submit(((struct gds *)state)->workers, ops, count);
}

static int gds_reap(void *state, struct backend_op **done, uint32_t capacity, int64_t timeout_ns)
{
    return workers_reap(((struct gds *)state)->workers, done, capacity, timeout_ns);
}

/* What the driver knows of an address; false if it is none of a device's. */
static bool find_device(const struct cuda_library *cuda, const char *memory, void **context,
                        int *ordinal)
{
    uint64_t address = (uint64_t)(uintptr_t)memory;
    unsigned int kind = 0;
    if (cuda->pointer_attribute(&kind, CUDA_POINTER_MEMORY_TYPE, address) != 0
        || kind != CUDA_MEMORY_OF_DEVICE
        || cuda->pointer_attribute(ordinal, CUDA_POINTER_DEVICE_ORDINAL, address) != 0)
        return false;
    if (cuda->pointer_attribute(context, CUDA_POINTER_CONTEXT, address) != 0)
        *context = NULL; /* mapped piece by piece: it belongs to a device, and to no context */
    return true;
}

static int fill_region(struct gds *gds, struct region *region, char *memory, uint64_t nbytes)
{
    void *last_context;
    int ordinal, last_ordinal, device;
    *region = (struct region){.memory = memory, .nbytes = nbytes, .primary_device = -1};
    if (!find_device(gds->cuda, memory, &region->context, &ordinal)
        || !find_device(gds->cuda, memory + nbytes - 1, &last_context, &last_ordinal)
        || ordinal != last_ordinal)
        return -EOPNOTSUPP;
    if (!region->context) {
        if (gds->cuda->device(&device, ordinal) != 0
            || gds->cuda->primary_retain(&region->context, device) != 0)
            return -ENODEV;
        region->primary_device = device;
    }
    if (gds->cuda->set_context(region->context) != 0)
        return -ENODEV;
    return 0;
}

static void release_region(struct gds *gds, struct region *region)
{
    if (region->by_cufile && gds->cuda->set_context(region->context) == 0)
        gds->cufile->deregister_buffer(region->memory);
    if (region->primary_device >= 0)
        gds->cuda->primary_release(region->primary_device);
}

/* Device memory only; host memory needs no registration here. */
static int gds_register_memory(void *state, void *memory, uint64_t nbytes)
{
    struct gds *gds = state;
    struct region region;
    uint32_t index = 0;
    while (index < gds->region_count && gds->regions[index].memory)
        index++;
    if (index == MEMORY_PIECE_LIMIT)
        return -ENOSPC;
    int rc = fill_region(gds, &region, memory, nbytes);
    if (rc < 0) {
        release_region(gds, &region);
        return rc;
    }
    char reason[DEVICE_REFUSAL_NBYTES] = "";
    if (!gds->cufile && !gds->refused
        && !(gds->cufile = cufile_library_load(reason, sizeof reason)))
        gds_refuse(gds, "%s", reason);
    /* Refused where there is no room for it in the window that drives see of the GPU, for one: then
     * cuFile moves it through a small buffer of its own. */
    region.by_cufile = gds->cufile && !gds->refused && !is_mapped(&region)
                       && gds->cufile->register_buffer(memory, nbytes, 0).code == 0;
    pthread_mutex_lock(&gds->lock);
    gds->regions[index] = region;
    if (index == gds->region_count)
        gds->region_count++;
    pthread_mutex_unlock(&gds->lock);
    return (int)index;
}

static void gds_unregister_memory(void *state, int index)
{
    struct gds *gds = state;
    pthread_mutex_lock(&gds->lock);
    struct region region = gds->regions[index];
    gds->regions[index].memory = NULL;
    pthread_mutex_unlock(&gds->lock);
    release_region(gds, &region);
}

/* Opened anew, because cuFile refuses a descriptor that was opened with O_NOFOLLOW, among others. By
 * this name also a file that has lost its own is found. */
static int reopen(int fd)
{
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    return open(name, (fcntl(fd, F_GETFL) & (O_ACCMODE | O_DIRECT)) | O_CLOEXEC);
}

static int gds_register_file(void *state, int fd)
{
    struct gds *gds = state;
    int index = 0;
    while (gds->files[index].fd >= 0)
        index++;
    int own_fd = reopen(fd);
    if (own_fd < 0)
        return -errno;
    pthread_mutex_lock(&gds->lock);
    gds->files[index] = (struct gds_file){.fd = own_fd};
    pthread_mutex_unlock(&gds->lock);
    return index;
}

static void gds_unregister_file(void *state, int index)
{
    struct gds *gds = state;
    pthread_mutex_lock(&gds->lock);
    struct gds_file file = gds->files[index];
    gds->files[index] = (struct gds_file){.fd = -1};
    pthread_mutex_unlock(&gds->lock);
    if (file.handle)
        gds->cufile->deregister_handle(file.handle);
    close(file.fd);
}

static void gds_report(void *state, struct device_report *report)
{
    struct gds *gds = state;
    report->gpudirect_nbytes = gds->cufile_nbytes;
    report->bounced_nbytes = gds->bounced_nbytes;
    report->refusal = gds->failed ? gds->failure : gds->refused ? gds->refusal : NULL;
}

static void gds_close(void *state)
{
    struct gds *gds = state;
    workers_close(gds->workers);
    for (uint32_t i = 0; i < gds->worker_count; i++)
        gds_worker_close(gds, &gds->states[i]);
    for (int i = 0; i < FILE_TABLE_LIMIT; i++)
        if (gds->files[i].fd >= 0)
            gds_unregister_file(gds, i);
    for (uint32_t i = 0; i < gds->region_count; i++)
        if (gds->regions[i].memory)
            gds_unregister_memory(gds, (int)i);
    gds_free(gds);
}

static const struct backend gds_backend = {
    .abi = BACKEND_ABI,
    .name = "gds",
    .open = gds_open,
    .submit = gds_submit,
    .reap = gds_reap,
    .close = gds_close,
    .register_memory = gds_register_memory,
    .unregister_memory = gds_unregister_memory,
    .register_file = gds_register_file,
    .unregister_file = gds_unregister_file,
    .memory_is_of_device = true,
    .report = gds_report,
};

static __attribute__((constructor)) void gds_register(void)
{
    backend_register(&gds_backend);
}
