/* Several threads on one engine, each comparing what it reads with what it wrote, over every backend
 * and under faults. Run by test_native_under_sanitizers.py; usage: native_stress FILE. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../../native/engine.h"
#include "../../native/split.h"

enum { THREADS = 4, STEPS = 20, BATCH = 7, EXTENT = 1 << 17 };

#define REQUIRE(condition)                                                                  \
    do {                                                                                    \
        if (!(condition)) {                                                                 \
            fprintf(stderr, "line %d: %s\n", __LINE__, #condition);                         \
            exit(1);                                                                        \
        }                                                                                   \
    } while (0)

struct worker {
    nvs_engine *engine;
    nvs_file *file;
    unsigned seed;
    uint64_t start_bytes;
    pthread_t thread;
};

static void move_batch(struct worker *worker, int direction, char **memory, const uint64_t *nbytes)
{
    /* The last first; every other one its predecessor's neighbour, so that blocks are shared. */
    nvs_piece pieces[BATCH];
    uint64_t at_bytes = worker->start_bytes;
    for (int i = 0; i < BATCH; i++) {
        pieces[BATCH - 1 - i] = (nvs_piece){memory[i], at_bytes, nbytes[i]};
        at_bytes = i % 2 ? worker->start_bytes + (uint64_t)(i + 1) * EXTENT
                         : at_bytes + round_up(nbytes[i], 4096);
    }
    int lane = (int)(rand_r(&worker->seed) % NVS_LANE_COUNT);
    nvs_request *request;
    REQUIRE(nvs_engine_submit(worker->engine, worker->file, direction, lane, pieces, BATCH,
                              &request) == 0);
    uint64_t failure_count;
    REQUIRE(nvs_request_wait(request, 0, &failure_count) <= 0);
    REQUIRE(nvs_request_wait(request, -1, &failure_count) == 0);
    REQUIRE(failure_count == 0 && nvs_request_done(request) == 1);
    nvs_request_release(request);
}

static void *work(void *argument)
{
    struct worker *worker = argument;
    char *written[BATCH], *came_back[BATCH];
    uint64_t nbytes[BATCH];
    for (int step = 0; step < STEPS; step++) {
        for (int i = 0; i < BATCH; i++) {
            nbytes[i] = rand_r(&worker->seed) % (i % 4 < 2 ? 8192 : EXTENT - 4096);
            /* The heap's addresses are misaligned by themselves, and a block ends where its bytes
             * do, so that a sanitizer sees one byte too many. */
            written[i] = malloc(nbytes[i]);
            came_back[i] = malloc(nbytes[i]);
            memset(written[i], (int)rand_r(&worker->seed), nbytes[i]);
            memset(came_back[i], 0xAA, nbytes[i]);
        }
        move_batch(worker, NVS_WRITE, written, nbytes);
        move_batch(worker, NVS_READ, came_back, nbytes);
        for (int i = 0; i < BATCH; i++) {
            REQUIRE(memcmp(written[i], came_back[i], nbytes[i]) == 0);
            free(written[i]);
            free(came_back[i]);
        }
        nvs_stats stats;
        REQUIRE(nvs_engine_stats(worker->engine, &stats) == 0);
    }
    return NULL;
}

static nvs_engine *open_engine(const char *backend, const char *script)
{
    char reason[256];
    int32_t status;
    nvs_options options = {.backend = backend, .fault_script = script, .block_nbytes = 16384, .background_nbytes = 65536,
                           .queue_depth = 6, .thread_count = 3};
    nvs_engine *engine = nvs_engine_open(&options, &status, reason, sizeof reason);
    if (!engine)
        fprintf(stderr, "%s: %s (%d)\n", backend, reason, status);
    REQUIRE(engine);
    return engine;
}

static nvs_file *open_file(const char *path, uint32_t member_count, bool last_is_direct)
{
    static const uint32_t weights[] = {3, 1, 2};
    const nvs_stripes stripes = {weights, member_count, 20480};
    nvs_member members[3];
    for (uint32_t i = 0; i < member_count; i++) {
        char name[4096];
        snprintf(name, sizeof name, "%s.%u", path, i);
        bool is_direct = i + 1 < member_count || last_is_direct;
        int fd = open(name, O_RDWR | O_CREAT | O_CLOEXEC | (is_direct ? O_DIRECT : 0), 0600);
        uint64_t nbytes = nvs_stripe_share(&stripes, i, (uint64_t)THREADS * BATCH * EXTENT);
        REQUIRE(fd >= 0 && ftruncate(fd, (off_t)nbytes) == 0);
        members[i] = (nvs_member){fd, is_direct ? NVS_DIRECT_PREFER : NVS_DIRECT_OFF};
    }
    return nvs_file_new(members, &stripes, 4096, 512);
}

static void stress(const char *backend, const char *script, const char *path, uint32_t member_count)
{
    nvs_engine *engine = open_engine(backend, script);
    nvs_file *file = open_file(path, member_count, script || member_count == 1);
    if (script) { /* a device of few tags: one block of 16384 takes two, so at most one more fits */
        file->members[0].tag_count = 3;
        file->members[0].tag_limit_nbytes = 8192;
    }
    struct worker workers[THREADS];
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (struct worker){engine, file, (unsigned)i + 1,
                                     (uint64_t)i * BATCH * EXTENT, 0};
        REQUIRE(pthread_create(&workers[i].thread, NULL, work, &workers[i]) == 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(workers[i].thread, NULL);
    nvs_file_release(file);
    REQUIRE(nvs_engine_close(engine, -1) == 0);
}

/* Nobody waits; close lands everything, and the last reference closes the file. */
static void abandon(const char *backend, const char *path)
{
    static char memory[BATCH][EXTENT];
    nvs_engine *engine = open_engine(backend, "any * delay 1");
    nvs_file *file = open_file(path, 2, false);
    for (int i = 0; i < BATCH; i++) {
        nvs_piece piece = {memory[i], (uint64_t)i * EXTENT, EXTENT};
        nvs_request *request;
        REQUIRE(nvs_engine_submit(engine, file, NVS_READ, NVS_PREFETCH, &piece, 1, &request) == 0);
        if (i % 2)
            REQUIRE(nvs_engine_cancel(engine, request) == 0);
        nvs_request_release(request);
    }
    nvs_file_release(file);
    int rc;
    while ((rc = nvs_engine_close(engine, 1000)) == -ETIMEDOUT)
        continue;
    REQUIRE(rc == 0);
}

/* A backend that lacks a hook, or speaks another ABI, is refused by name when it is chosen. */
static int broken_open(void **state, struct backend_options *options)
{
    (void)state, (void)options;
    return 0;
}

static void refuse_broken_backends(void)
{
    static const struct backend lacking = {.abi = BACKEND_ABI, .name = "lacking", .open = broken_open};
    static const struct backend alien = {.abi = BACKEND_ABI + 1, .name = "alien"};
    char reason[256] = "";
    backend_register(&lacking);
    backend_register(&alien);
    REQUIRE(!backend_choose("lacking", reason, sizeof reason) && strstr(reason, "submit"));
    REQUIRE(!backend_choose("alien", reason, sizeof reason) && strstr(reason, "ABI"));
    REQUIRE(!backend_choose("missing", reason, sizeof reason) && strstr(reason, "skeleton"));
}

/* field case A06: sizes beyond 32 bits, without any I/O. */
static void count_blocks_of_large_requests(void)
{
    uint64_t sizes[] = {(1ULL << 31) + 4096, (1ULL << 33) + 1};
    for (int i = 0; i < 2; i++) {
        uint64_t cut_nbytes = 0, block_count = 0;
        while (cut_nbytes < sizes[i]) {
            cut_nbytes += split_next_nbytes(sizes[i], cut_nbytes, 4096);
            block_count++;
        }
        REQUIRE(cut_nbytes == sizes[i] && block_count == (sizes[i] + 4095) / 4096);
    }
    uint32_t done_nbytes = 4096;
    REQUIRE(split_progress(&done_nbytes, 100, 1U << 30, 4096) == SPLIT_STUCK);
    REQUIRE(split_progress(&done_nbytes, 5000, 1U << 30, 4096) == SPLIT_RESUME && done_nbytes == 8192);
    REQUIRE(split_progress(&done_nbytes, 1U << 31, 1U << 30, 4096) == SPLIT_FINISHED);
}

/* A sum reads no byte beyond its piece, wherever that begins. */
static void sum_odd_sizes(void)
{
    for (uint64_t nbytes = 0; nbytes < 600; nbytes += 7) {
        char *memory = malloc(nbytes + 1);
        memset(memory, 1, nbytes + 1);
        nvs_piece pieces[] = {{memory, 0, nbytes}, {memory + 1, 0, nbytes}};
        uint64_t sums[2];
        nvs_digest_pieces(pieces, 2, sums);
        REQUIRE(sums[0] == sums[1] && sums[0] == nvs_digest(memory, nbytes, 0));
        free(memory);
    }
}

int main(int argument_count, char **arguments)
{
    static const char *const backends[] = {"uring", "aio", "posix", "skeleton"};
    REQUIRE(argument_count == 2);
    refuse_broken_backends();
    count_blocks_of_large_requests();
    sum_odd_sizes();
    for (size_t i = 0; i < sizeof backends / sizeof *backends; i++) {
        for (uint32_t member_count = 1; member_count <= 3; member_count += 2) {
            stress(backends[i], NULL, arguments[1], member_count);
            stress(backends[i],
                   "any 5 short 4096; any 50 errno 11; any 80 busy; any 120 errno 22; "
                   "any 200 short 9000; any 300 delay 5; read 90 errno 4; "
                   "seed 1 rate 10 delay,late,busy",
                   arguments[1], member_count);
        }
        abandon(backends[i], arguments[1]);
    }
    puts("done");
    return 0;
}
