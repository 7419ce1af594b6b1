/* Lifetimes of requests and files: both are counted, so either side may let go first. */
#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

static uint32_t queue_setting(dev_t device, const char *name)
{
    char path[96];
    unsigned value = 0;
    /* A partition's queue is its disk's. */
    for (int up = 0; up < 2 && value == 0; up++) {
        snprintf(path, sizeof path, "/sys/dev/block/%u:%u/%squeue/%s", major(device), minor(device),
                 up ? "../" : "", name);
        FILE *file = fopen(path, "re");
        if (file && fscanf(file, "%u", &value) != 1)
            value = 0;
        if (file)
            fclose(file);
    }
    return value;
}

/* Asking sysfs takes longer than opening the file, so each device is asked once. */
struct known_device {
    dev_t device;
    uint32_t tag_count;
    uint32_t tag_limit_nbytes;
};

static struct known_device ask_device(dev_t device)
{
    struct known_device asked = {.device = device};
    uint32_t limit_kib = queue_setting(device, "max_sectors_kb");
    asked.tag_limit_nbytes = (limit_kib < 1U << 20 ? limit_kib : 1U << 20) * 1024;
    if (asked.tag_limit_nbytes > 0)
        asked.tag_count = queue_setting(device, "nr_requests");
    return asked;
}

/* Where the table is busy, for ever perhaps in a forked child, the device is asked again. */
static struct known_device know_device(dev_t device)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static struct known_device known[DEVICE_LIMIT];
    static int known_count;
    if (pthread_mutex_trylock(&lock) != 0)
        return ask_device(device);
    int at = 0;
    while (at < known_count && known[at].device != device)
        at++;
    if (at == known_count && known_count < DEVICE_LIMIT)
        known[known_count++] = ask_device(device);
    struct known_device found = at < known_count ? known[at] : ask_device(device);
    pthread_mutex_unlock(&lock);
    return found;
}

static void learn_tags(struct member *member)
{
    struct stat facts;
    if (fstat(member->fd, &facts) < 0)
        return;
    struct known_device known = know_device(facts.st_dev);
    member->device = facts.st_dev;
    member->tag_limit_nbytes = known.tag_limit_nbytes;
    member->tag_count = known.tag_count;
}

nvs_file *nvs_file_new(const nvs_member *members, const nvs_stripes *stripes,
                       uint32_t offset_alignment_nbytes, uint32_t memory_alignment_nbytes)
{
    uint32_t member_count = stripes->member_count;
    nvs_file *file = calloc(1, sizeof *file + member_count * sizeof *file->members);
    if (!file)
        return NULL;
    file->references = 1;
    file->offset_alignment_nbytes = offset_alignment_nbytes;
    file->memory_alignment_nbytes = memory_alignment_nbytes;
    file->member_count = member_count;
    stripe_lay_out(&file->layout, stripes->weights, member_count, stripes->stripe_nbytes);
    for (uint32_t i = 0; i < member_count; i++) {
        struct member *member = &file->members[i];
        member->fd = members[i].fd;
        member->direct_mode = members[i].direct_mode;
        member->direct = members[i].direct_mode != NVS_DIRECT_OFF;
        learn_tags(member);
    }
    return file;
}

int nvs_file_is_direct(nvs_file *file, uint32_t member, int32_t *fallback_errno)
{
    *fallback_errno = file->members[member].fallback_errno;
    return file->members[member].direct;
}

/* Blocks already in the kernel keep the flag they were submitted with; that does no harm. */
void member_fall_back(struct member *member, int reason)
{
    int flags = fcntl(member->fd, F_GETFL);
    fcntl(member->fd, F_SETFL, flags & ~O_DIRECT);
    member->fallback_errno = reason;
    member->direct = false;
}

static void member_close(struct member *member)
{
    struct file_table *table = atomic_load(&member->table);
    if (table)
        file_table_leave(table, member->index);
    close(member->fd);
}

void nvs_file_release(nvs_file *file)
{
    if (atomic_fetch_sub(&file->references, 1) == 1) {
        for (uint32_t i = 0; i < file->member_count; i++)
            member_close(&file->members[i]);
        free(file);
    }
}

static int compare_places(const void *left, const void *right)
{
    uint64_t a = ((const struct piece *)left)->offset_bytes;
    uint64_t b = ((const struct piece *)right)->offset_bytes;
    return a < b ? -1 : a > b;
}

/* Puts the pieces into the order of their places, unless they are in it. */
static void sort_pieces(nvs_request *request)
{
    size_t i = 1;
    while (i < request->piece_count
           && request->pieces[i - 1].offset_bytes <= request->pieces[i].offset_bytes)
        i++;
    if (i < request->piece_count)
        qsort(request->pieces, request->piece_count, sizeof *request->pieces, compare_places);
}

nvs_request *request_new(nvs_file *file, int direction, int lane, const nvs_piece *pieces,
                         size_t piece_count)
{
    nvs_request *request = calloc(1, sizeof *request + piece_count * sizeof *request->pieces);
    if (!request)
        return NULL;
    request->references = 2;
    request->pid = getpid();
    request->file = file;
    request->direction = direction;
    request->lane = lane;
    request->piece_count = piece_count;
    for (size_t i = 0; i < piece_count; i++) {
        request->pieces[i].memory = pieces[i].memory;
        request->pieces[i].offset_bytes = pieces[i].offset_bytes;
        request->pieces[i].nbytes = pieces[i].nbytes;
        request->pieces[i].index = (uint32_t)i;
        request->queued |= pieces[i].nbytes > 0;
    }
    sort_pieces(request);
    request->submitted_ns = request->finished_ns = monotonic_ns(); /* empty, it takes no time */
    atomic_fetch_add(&file->references, 1);
    return request;
}

void request_discard(nvs_request *request)
{
    nvs_file_release(request->file);
    free(request);
}

void request_finish(nvs_request *request)
{
    nvs_file_release(request->file);
    event_set(&request->finished);
    nvs_request_release(request);
}

int nvs_request_done(nvs_request *request)
{
    if (request->pid != getpid())
        return NVS_ERROR_FORKED;
    return (int)atomic_load_explicit(&request->finished, memory_order_acquire);
}

int nvs_request_wait(nvs_request *request, int64_t timeout_ns, uint64_t *failure_count)
{
    if (request->pid != getpid())
        return NVS_ERROR_FORKED;
    int rc = event_wait(&request->finished, timeout_ns);
    if (rc == 0)
        *failure_count = request->failure_count;
    return rc;
}

size_t nvs_request_failures(nvs_request *request, nvs_failure *failures, size_t capacity)
{
    size_t filled_count = 0;
    for (size_t i = 0; i < request->piece_count && filled_count < capacity; i++) {
        const struct piece *piece = &request->pieces[i];
        if (piece->status != 0)
            failures[filled_count++] = (nvs_failure){piece->index, piece->status, piece->tries,
                                                     piece->done_nbytes, piece->error_offset_bytes};
    }
    return filled_count;
}

void nvs_request_times(nvs_request *request, int64_t *submitted_ns, int64_t *finished_ns)
{
    bool is_over = atomic_load_explicit(&request->finished, memory_order_acquire);
    *submitted_ns = request->submitted_ns;
    *finished_ns = is_over ? request->finished_ns : -1;
}

void nvs_request_release(nvs_request *request)
{
    if (atomic_fetch_sub(&request->references, 1) == 1)
        free(request);
}
