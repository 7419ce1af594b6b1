/* A libcuda.so.1 without a GPU: as much of it as nvmeswap uses, stricter than the real one. Copies
 * happen when their stream is waited for, and need the context of their stream. FAKE_CUDA scripts it:
 *   init=N       cuInit answers N
 *   mapped=1     memory has no context, as what expandable_segments maps
 *   copy=N       copies on streams answer N
 *   pinned=N     page-locked memory is refused with N */
#define _GNU_SOURCE
#include "cuda.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_CONTEXT = 201 };
enum { MEMORY_LIMIT = 64, COPY_LIMIT = 256 };

static struct memory { char *address, *shadow; size_t nbytes; } memories[MEMORY_LIMIT];
static int primary; /* its address is the context's */
static atomic_int retain_count, stream_count, pinned_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread void *current;

struct copy { void *to; const void *from; size_t nbytes; };
struct stream { void *context; int count; struct copy copies[COPY_LIMIT]; };

long fake_script(const char *variable, const char *word, long otherwise)
{
    const char *script = getenv(variable), *found = script;
    size_t length = strlen(word);
    while (found && (found = strstr(found, word))) {
        if ((found == script || found[-1] == ' ') && found[length] == '=')
            return atol(found + length + 1);
        found += length;
    }
    return otherwise;
}

static struct memory *find(uint64_t address)
{
    for (int i = 0; i < MEMORY_LIMIT; i++)
        if (memories[i].address && address >= (uint64_t)(uintptr_t)memories[i].address
            && address < (uint64_t)(uintptr_t)memories[i].address + memories[i].nbytes)
            return &memories[i];
    return NULL;
}

char *fake_cuda_shadow(uint64_t address, size_t nbytes)
{
    pthread_mutex_lock(&lock);
    struct memory *memory = find(address);
    uint64_t begin = memory ? address - (uint64_t)(uintptr_t)memory->address : 0;
    char *shadow = memory && begin + nbytes <= memory->nbytes ? memory->shadow + begin : NULL;
    pthread_mutex_unlock(&lock);
    return shadow;
}

void *fake_cuda_current(void) { return current; }

/* What has not been given back. */
int fake_cuda_streams(void) { return stream_count; }
int fake_cuda_pinned(void) { return pinned_count; }
int fake_cuda_retained(void) { return retain_count; }

int cuInit(unsigned int flags) { (void)flags; return (int)fake_script("FAKE_CUDA", "init", 0); }

int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return ordinal == 0 ? 0 : INVALID_DEVICE;
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
    (void)device;
    retain_count++;
    *context = &primary;
    return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device)
{
    (void)device;
    retain_count--;
    return 0;
}

int cuCtxSetCurrent(void *context) { current = context; return 0; }

static __thread void *stack[8];
static __thread int depth;

int cuCtxPushCurrent_v2(void *context)
{
    stack[depth++] = current;
    current = context;
    return 0;
}

int cuCtxPopCurrent_v2(void **context)
{
    *context = current;
    current = stack[--depth];
    return 0;
}

int cuMemAlloc_v2(uint64_t *address, size_t nbytes)
{
    if (!current || retain_count == 0)
        return INVALID_CONTEXT;
    size_t page_nbytes = (nbytes + 4095) & ~(size_t)4095;
    int fd = memfd_create("device", 0);
    if (ftruncate(fd, (off_t)page_nbytes) != 0)
        return OUT_OF_MEMORY;
    char *shadow = mmap(NULL, page_nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    char *hidden = mmap(NULL, page_nbytes, PROT_NONE, MAP_SHARED, fd, 0);
    close(fd);
    pthread_mutex_lock(&lock);
    int i = 0;
    while (memories[i].address)
        i++;
    memories[i] = (struct memory){hidden, shadow, page_nbytes};
    pthread_mutex_unlock(&lock);
    *address = (uint64_t)(uintptr_t)hidden;
    return 0;
}

int cuMemFree_v2(uint64_t address)
{
    pthread_mutex_lock(&lock);
    struct memory *memory = find(address);
    if (memory) {
        munmap(memory->address, memory->nbytes);
        munmap(memory->shadow, memory->nbytes);
        memory->address = NULL;
    }
    pthread_mutex_unlock(&lock);
    return memory ? 0 : INVALID_VALUE;
}

int cuPointerGetAttribute(void *value, int attribute, uint64_t address)
{
    if (!fake_cuda_shadow(address, 1))
        return INVALID_VALUE;
    if (attribute == 1)
        *(void **)value = fake_script("FAKE_CUDA", "mapped", 0) ? NULL : &primary;
    else if (attribute == 2)
        *(unsigned int *)value = 2;
    else if (attribute == 9)
        *(int *)value = 0;
    else
        return INVALID_VALUE;
    return 0;
}

int cuMemHostAlloc(void **memory, size_t nbytes, unsigned int flags)
{
    (void)flags;
    int refusal = (int)fake_script("FAKE_CUDA", "pinned", 0);
    if (!current || refusal)
        return current ? refusal : INVALID_CONTEXT;
    pinned_count++;
    return posix_memalign(memory, 4096, nbytes) == 0 ? 0 : OUT_OF_MEMORY;
}

int cuMemFreeHost(void *memory)
{
    pinned_count--;
    free(memory);
    return 0;
}

int cuStreamCreate(void **made, unsigned int flags)
{
    if (!current || flags != 1) /* a stream that waits for the legacy one is a mistake here */
        return INVALID_CONTEXT;
    struct stream *stream = calloc(1, sizeof *stream);
    stream->context = current;
    stream_count++;
    *made = stream;
    return 0;
}

int cuStreamDestroy_v2(void *stream)
{
    if (((struct stream *)stream)->count > 0)
        abort();
    stream_count--;
    free(stream);
    return 0;
}

int cuStreamSynchronize(void *made)
{
    struct stream *stream = made;
    for (int i = 0; i < stream->count; i++)
        memcpy(stream->copies[i].to, stream->copies[i].from, stream->copies[i].nbytes);
    stream->count = 0;
    return 0;
}

static int add_copy(struct stream *stream, void *to, const void *from, size_t nbytes)
{
    int refusal = (int)fake_script("FAKE_CUDA", "copy", 0);
    if (refusal)
        return refusal;
    if (!stream || stream->context != current)
        return INVALID_CONTEXT;
    if (!to || !from || stream->count == COPY_LIMIT)
        return INVALID_VALUE;
    stream->copies[stream->count++] = (struct copy){to, from, nbytes};
    return 0;
}

int cuMemcpyHtoDAsync_v2(uint64_t device, const void *host, size_t nbytes, void *stream)
{
    return add_copy(stream, fake_cuda_shadow(device, nbytes), host, nbytes);
}

int cuMemcpyDtoHAsync_v2(void *host, uint64_t device, size_t nbytes, void *stream)
{
    return add_copy(stream, host, fake_cuda_shadow(device, nbytes), nbytes);
}

int cuMemcpyHtoD_v2(uint64_t device, const void *host, size_t nbytes)
{
    char *shadow = fake_cuda_shadow(device, nbytes);
    if (!shadow || !current)
        return INVALID_VALUE;
    memcpy(shadow, host, nbytes);
    return 0;
}

int cuMemcpyDtoH_v2(void *host, uint64_t device, size_t nbytes)
{
    const char *shadow = fake_cuda_shadow(device, nbytes);
    if (!shadow || !current)
        return INVALID_VALUE;
    memcpy(host, shadow, nbytes);
    return 0;
}
