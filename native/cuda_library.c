#define _GNU_SOURCE
#include "cuda_library.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static const char CUDA_FILE[] = "libcuda.so.1";
static const char *const CUDA_NAMES[] = {
    "cuInit", "cuPointerGetAttribute", "cuDeviceGet", "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2", "cuCtxSetCurrent", "cuMemHostAlloc", "cuMemFreeHost",
    "cuStreamCreate", "cuStreamDestroy_v2", "cuStreamSynchronize", "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
};
static const char CUFILE_FILE[] = "libcufile.so.0";
static const char *const CUFILE_NAMES[] = {
    "cuFileDriverOpen", "cuFileHandleRegister", "cuFileHandleDeregister", "cuFileBufRegister",
    "cuFileBufDeregister", "cuFileRead", "cuFileWrite",
};
enum {
    CUDA_COUNT = sizeof CUDA_NAMES / sizeof *CUDA_NAMES,
    CUFILE_COUNT = sizeof CUFILE_NAMES / sizeof *CUFILE_NAMES,
    CUFILE_ALREADY_OPEN = 5026, /* torch may have opened it */
};
_Static_assert(sizeof(struct cuda_library) == CUDA_COUNT * sizeof(void *), "a name for each");
_Static_assert(sizeof(struct cufile_library) == CUFILE_COUNT * sizeof(void *), "a name for each");

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards what follows */
static struct cuda_library cuda;
static struct cufile_library cufile;
static bool cuda_is_loaded, cufile_is_loaded;

static bool load(const char *file, const char *const *names, size_t count, void *functions,
                 char *reason, size_t reason_nbytes)
{
    void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(reason, reason_nbytes, "%s", dlerror());
        return false;
    }
    for (size_t i = 0; i < count; i++) {
        void *function = dlsym(library, names[i]);
        if (!function) {
            snprintf(reason, reason_nbytes, "%s lacks %s: it is too old", file, names[i]);
            return false;
        }
        memcpy((char *)functions + i * sizeof function, &function, sizeof function);
    }
    return true;
}

static bool start_cuda(char *reason, size_t reason_nbytes)
{
    int code = cuda.init(0);
    if (code != 0)
        snprintf(reason, reason_nbytes, "cuInit failed with CUresult %d: no GPU, or its driver is "
                 "another version's", code);
    return code == 0;
}

static bool start_cufile(char *reason, size_t reason_nbytes)
{
    struct cufile_error error = cufile.open_driver();
    bool is_open = error.code == 0 || error.code == CUFILE_ALREADY_OPEN;
    if (!is_open)
        snprintf(reason, reason_nbytes, "cuFileDriverOpen failed with %d (CUresult %d)", error.code,
                 error.cuda_code);
    return is_open;
}

const struct cuda_library *cuda_library_load(char *reason, size_t reason_nbytes)
{
    pthread_mutex_lock(&lock);
    if (!cuda_is_loaded)
        cuda_is_loaded = load(CUDA_FILE, CUDA_NAMES, CUDA_COUNT, &cuda, reason, reason_nbytes)
                         && start_cuda(reason, reason_nbytes);
    bool is_loaded = cuda_is_loaded;
    pthread_mutex_unlock(&lock);
    return is_loaded ? &cuda : NULL;
}

const struct cufile_library *cufile_library_load(char *reason, size_t reason_nbytes)
{
    pthread_mutex_lock(&lock);
    if (!cufile_is_loaded)
        cufile_is_loaded =
            load(CUFILE_FILE, CUFILE_NAMES, CUFILE_COUNT, &cufile, reason, reason_nbytes)
            && start_cufile(reason, reason_nbytes);
    bool is_loaded = cufile_is_loaded;
    pthread_mutex_unlock(&lock);
    return is_loaded ? &cufile : NULL;
}
