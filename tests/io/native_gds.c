/* The backend gds under the compiler's watch: threads with device memory and files of their own, while
 * cuFile refuses in the middle. Over the fakes of fake_gds/; prints "done". */
#define _GNU_SOURCE
#include <assert.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fake_gds/cuda.h"
#include "interface.h"

int cuDevicePrimaryCtxRetain(void **context, int device);
int cuCtxSetCurrent(void *context);
int cuMemAlloc_v2(uint64_t *address, size_t nbytes);
int cuMemFree_v2(uint64_t address);
int fake_cuda_streams(void);
int fake_cuda_pinned(void);

#define REQUIRE(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            abort(); \
        } \
    } while (0)

enum { THREAD_COUNT = 4, TURN_COUNT = 6, NBYTES = 1 << 20 };
static nvs_engine *engine;
static const char *folder;

static void move(nvs_file *file, int direction, uint64_t device)
{
    nvs_piece pieces[] = {{(void *)(uintptr_t)device, 0, NBYTES / 2},
                          {(void *)(uintptr_t)(device + NBYTES / 2), NBYTES / 2, NBYTES / 2}};
    nvs_request *request;
    uint64_t failure_count;
    REQUIRE(nvs_engine_submit(engine, file, direction, NVS_DEMAND, pieces, 2, &request) == 0);
    REQUIRE(nvs_request_wait(request, -1, &failure_count) == 0 && failure_count == 0);
    nvs_request_release(request);
}

static nvs_file *open_file(int number)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%d.swp", folder, number);
    nvs_member member = {open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600), NVS_DIRECT_OFF};
    REQUIRE(member.fd >= 0 && ftruncate(member.fd, NBYTES) == 0);
    uint32_t weight = 1;
    nvs_stripes stripes = {&weight, 1, 1 << 20};
    return nvs_file_new(&member, &stripes, 4096, 512);
}

static void *work(void *argument)
{
    int number = *(int *)argument;
    void *context;
    uint64_t device;
    REQUIRE(cuDevicePrimaryCtxRetain(&context, 0) == 0 && cuCtxSetCurrent(context) == 0);
    REQUIRE(cuMemAlloc_v2(&device, NBYTES) == 0);
    char *shadow = fake_cuda_shadow(device, NBYTES);
    for (int turn = 0; turn < TURN_COUNT; turn++) {
        REQUIRE(nvs_engine_register_memory(engine, (void *)(uintptr_t)device, NBYTES) == NBYTES);
        nvs_file *file = open_file(number);
        memset(shadow, number * 16 + turn, NBYTES);
        move(file, NVS_WRITE, device);
        memset(shadow, 0xAA, NBYTES);
        move(file, NVS_READ, device);
        for (int i = 0; i < NBYTES; i += 997)
            REQUIRE(shadow[i] == (char)(number * 16 + turn));
        nvs_stats stats;
        char reason[256];
        REQUIRE(nvs_engine_stats(engine, &stats) == 0);
        REQUIRE(nvs_engine_gds_refusal(engine, reason, sizeof reason) >= 0);
        nvs_file_release(file);
        REQUIRE(nvs_engine_unregister_memory(engine, (void *)(uintptr_t)device, NBYTES) == 0);
    }
    REQUIRE(cuMemFree_v2(device) == 0);
    return NULL;
}

int main(int count, char **arguments)
{
    REQUIRE(count == 2);
    folder = arguments[1];
    nvs_options options = {.backend = "gds", .block_nbytes = 65536, .background_nbytes = 1 << 20,
                           .queue_depth = 16, .thread_count = 3};
    int32_t status;
    char reason[256];
    engine = nvs_engine_open(&options, &status, reason, sizeof reason);
    if (!engine) {
        fprintf(stderr, "%s\n", reason);
        return 1;
    }
    pthread_t threads[THREAD_COUNT];
    int numbers[THREAD_COUNT];
    for (int i = 0; i < THREAD_COUNT; i++) {
        numbers[i] = i;
        REQUIRE(pthread_create(&threads[i], NULL, work, &numbers[i]) == 0);
    }
    for (int i = 0; i < THREAD_COUNT; i++)
        pthread_join(threads[i], NULL);
    REQUIRE(nvs_engine_close(engine, -1) == 0);
    REQUIRE(fake_cuda_streams() == 0 && fake_cuda_pinned() == 0);
    puts("done");
    return 0;
}
