/* A libcufile.so.0 over the fake libcuda.so.1. FAKE_CUFILE scripts it:
 *   driver=N      cuFileDriverOpen answers N
 *   handle=N      cuFileHandleRegister answers N
 *   limit=N       at most N bytes are registered, in all
 *   read=N        cuFileRead answers N, having spoilt the memory; write=N likewise, with the file
 *   errno=N       with read=-1 or write=-1
 *   short=N       at most N bytes are moved in a call
 *   silent=1      reads answer success and bring nothing
 *   after=N       read and write are good for the first N calls */
#define _GNU_SOURCE
#include "cuda.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum { INVALID_VALUE = 5022, NOT_REGISTERED = 5024, NO_CONTEXT = 5011, BUFFER_LIMIT = 64 };
enum { SPOILT = 0xDB };

struct error { int code, cuda_code; };
struct descriptor { int type; union { int fd; void *handle; } file; const void *operations; };
struct handle { int fd; };

static struct buffer { const char *memory; size_t nbytes; } buffers[BUFFER_LIMIT];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_int handle_count, registered_count, buffer_count, call_count;

static long script(const char *word, long otherwise)
{
    return fake_script("FAKE_CUFILE", word, otherwise);
}

/* Registered now, handles ever registered, registered buffers now, calls of read and write. */
int fake_cufile_handles(void) { return handle_count; }
int fake_cufile_handles_ever(void) { return registered_count; }
int fake_cufile_buffers(void) { return buffer_count; }
int fake_cufile_calls(void) { return call_count; }

struct error cuFileDriverOpen(void)
{
    int code = (int)script("driver", 0);
    return (struct error){fake_cuda_current() ? code : NO_CONTEXT, 0};
}

struct error cuFileHandleRegister(void **made, struct descriptor *descriptor)
{
    int code = (int)script("handle", 0);
    if (code != 0 || descriptor->type != 1 || descriptor->operations || !fake_cuda_current())
        return (struct error){code ? code : INVALID_VALUE, 0};
    struct handle *handle = malloc(sizeof *handle);
    handle->fd = descriptor->file.fd;
    handle_count++;
    registered_count++;
    *made = handle;
    return (struct error){0, 0};
}

void cuFileHandleDeregister(void *handle)
{
    handle_count--;
    free(handle);
}

struct error cuFileBufRegister(const void *memory, size_t nbytes, int flags)
{
    long limit_nbytes = script("limit", -1);
    if (flags != 0 || !fake_cuda_shadow((uint64_t)(uintptr_t)memory, nbytes) || !fake_cuda_current())
        return (struct error){INVALID_VALUE, 0};
    pthread_mutex_lock(&lock);
    size_t total_nbytes = nbytes;
    int slot = -1;
    for (int i = 0; i < BUFFER_LIMIT; i++) {
        total_nbytes += buffers[i].nbytes;
        if (!buffers[i].memory)
            slot = i;
    }
    bool fits = slot >= 0 && (limit_nbytes < 0 || total_nbytes <= (size_t)limit_nbytes);
    if (fits) {
        buffers[slot] = (struct buffer){memory, nbytes};
        buffer_count++;
    }
    pthread_mutex_unlock(&lock);
    return (struct error){fits ? 0 : 5011, fits ? 0 : 2};
}

struct error cuFileBufDeregister(const void *memory)
{
    int code = NOT_REGISTERED;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < BUFFER_LIMIT; i++)
        if (buffers[i].memory == memory) {
            buffers[i] = (struct buffer){NULL, 0};
            buffer_count--;
            code = 0;
        }
    pthread_mutex_unlock(&lock);
    return (struct error){code, 0};
}

/* What a registered buffer is called by: its beginning. */
static bool is_named_rightly(const char *memory, off_t at)
{
    bool is_right = true;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < BUFFER_LIMIT; i++) {
        const char *begin = buffers[i].memory, *end = begin + buffers[i].nbytes;
        if (begin && memory + at >= begin && memory + at < end)
            is_right = memory == begin;
    }
    pthread_mutex_unlock(&lock);
    return is_right;
}

static bool is_faulty(void)
{
    return call_count++ >= script("after", 0);
}

ssize_t cuFileRead(void *made, void *memory, size_t nbytes, off_t offset, off_t memory_offset)
{
    struct handle *handle = made;
    char *shadow = fake_cuda_shadow((uint64_t)(uintptr_t)memory + (uint64_t)memory_offset, nbytes);
    if (!shadow || !fake_cuda_current() || !is_named_rightly(memory, memory_offset))
        return -INVALID_VALUE;
    size_t most_nbytes = (size_t)script("short", (long)nbytes);
    if (!is_faulty())
        return pread(handle->fd, shadow, nbytes, offset);
    if (script("silent", 0))
        return (ssize_t)nbytes;
    long answer = script("read", 0);
    if (answer != 0) {
        memset(shadow, SPOILT, nbytes);
        errno = (int)script("errno", 0);
        return answer;
    }
    return pread(handle->fd, shadow, most_nbytes < nbytes ? most_nbytes : nbytes, offset);
}

ssize_t cuFileWrite(void *made, const void *memory, size_t nbytes, off_t offset, off_t memory_offset)
{
    struct handle *handle = made;
    char *shadow = fake_cuda_shadow((uint64_t)(uintptr_t)memory + (uint64_t)memory_offset, nbytes);
    if (!shadow || !fake_cuda_current() || !is_named_rightly(memory, memory_offset))
        return -INVALID_VALUE;
    size_t most_nbytes = (size_t)script("short", (long)nbytes);
    if (!is_faulty())
        return pwrite(handle->fd, shadow, nbytes, offset);
    long answer = script("write", 0);
    if (answer != 0) {
        errno = (int)script("errno", 0);
        return answer;
    }
    return pwrite(handle->fd, shadow, most_nbytes < nbytes ? most_nbytes : nbytes, offset);
}
