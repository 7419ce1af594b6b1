/* Seeded schedules: an engine over a random backend under random faults, files in FOLDER, random
 * requests; after each nothing may be wrong, hang or be left. A schedule depends on its number alone,
 * but for the kernel's timing. Usage: native_schedules FOLDER FIRST COUNT. */
#define _GNU_SOURCE
#include "native_model.h"

#include <dirent.h>
#include <errno.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statfs.h>
#include <unistd.h>

enum {
    FILE_LIMIT = 3, REQUEST_LIMIT = 10, POISON = 0xAA, ARENA_NBYTES = 1 << 21,
    WATCHDOG_S = 60, WARM_UP = 100, LEAK_NBYTES = 1 << 17,
    TMPFS = 0x01021994
};

enum {
    SHORT = 1, ERRNO = 2, REFUSE = 4, BUSY = 8, DELAY = 16, NEVER = 32, LATE = 64, FLIP = 128,
    ACTION_COUNT = 8
};
static const char *const action_names[] = {"short", "errno", "refuse", "busy",
                                           "delay", "never", "late",   "flip"};

struct sent {
    nvs_request *request; /* NULL: nobody waits for it */
    struct model *model;
    int direction;
    bool cancelled;
    bool over;
    size_t piece_count;
    nvs_piece pieces[PIECE_LIMIT];
    void *heap[PIECE_LIMIT]; /* where memory is not the arena's */
};

struct schedule {
    nvs_engine *engine;
    unsigned actions; /* that the scripts may have drawn */
    bool is_script;
    struct model *models[FILE_LIMIT];
    int model_count;
    struct sent sent[REQUEST_LIMIT];
    int sent_count;
    size_t arena_at;
};

static unsigned long number;
static char description[256];
static unsigned char *arena;

static void require(bool condition, const char *what)
{
    if (condition)
        return;
    fprintf(stderr, "schedule %lu: %s (%s)\n", number, what, description);
    exit(1);
}

static void tell_hang(int signal)
{
    (void)signal;
    static const char what[] = ": hangs\n";
    if (write(2, description, strlen(description)) < 0 || write(2, what, sizeof what - 1) < 0)
        _exit(3);
    _exit(2);
}

static int count_descriptors(void)
{
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    require(folder, "no /proc");
    while (readdir(folder))
        count++;
    closedir(folder);
    return count;
}

/* --- the engine -------------------------------------------------------------------------------- */

/* One of: no fault, faults that only disturb, the usual ones, and any, rare or frequent. */
static void make_script(struct schedule *schedule, char *script, size_t nbytes)
{
    unsigned percent = 1 + (unsigned)roll(25), actions;
    switch (roll(6)) {
    case 0: actions = 0; break;
    case 1: actions = DELAY | LATE; break;
    case 2: actions = LATE; percent = 100; break;
    case 3: actions = SHORT | ERRNO | REFUSE | BUSY | DELAY | LATE; break;
    case 4: actions = (unsigned)roll(1 << ACTION_COUNT); break;
    default: actions = (unsigned)roll(1 << ACTION_COUNT) & (unsigned)roll(1 << ACTION_COUNT); percent *= 3; break;
    }
    /* Each of these may cost the I/O thread a pause. */
    if (actions & (ERRNO | REFUSE | BUSY) && percent > 40)
        percent = 40;
    script[0] = '\0';
    size_t used = actions ? (size_t)snprintf(script, nbytes, "seed %lu rate %u ",
                                             (unsigned long)roll(1000000), percent) : 0;
    for (int i = 0; i < ACTION_COUNT; i++)
        if (actions & 1U << i)
            used += (size_t)snprintf(script + used, nbytes - used, "%s,", action_names[i]);
    schedule->actions |= actions;
}

/* Ranges that meet, overlap or leave gaps. */
static void register_memory(struct schedule *schedule)
{
    uint64_t begin = roll(ARENA_NBYTES / 4096) * 4096, nbytes = 1 + roll(ARENA_NBYTES - begin);
    require(nvs_engine_register_memory(schedule->engine, arena + begin, nbytes) >= 0,
            "memory is not registered");
}

static void open_engine(struct schedule *schedule)
{
    static const char *const backends[] = {"uring", "aio", "posix", "skeleton"};
    char script[128], reason[256];
    make_script(schedule, script, sizeof script);
    schedule->is_script = script[0] != '\0' || roll(2);
    nvs_options options = {
        .backend = backends[roll(4)],
        .fault_script = schedule->is_script ? script : NULL,
        .block_nbytes = 4096ULL << roll(7),
        .background_nbytes = 4096 * (1 + roll(256)),
        .queue_depth = 1 + (uint32_t)roll(roll(2) ? 4 : 32),
        .thread_count = 1 + (uint32_t)roll(3),
    };
    int32_t status;
    schedule->engine = nvs_engine_open(&options, &status, reason, sizeof reason);
    if (!schedule->engine && (status == -EPERM || status == -ENOSYS)) { /* a container's seccomp */
        options.backend = "posix";
        schedule->engine = nvs_engine_open(&options, &status, reason, sizeof reason);
    }
    snprintf(description, sizeof description, "schedule %lu: %s, blocks of %lu, depth %u, \"%s\"",
             number, options.backend, (unsigned long)options.block_nbytes, options.queue_depth,
             script);
    require(schedule->engine, reason);
    for (uint64_t count = roll(3); count > 0; count--)
        register_memory(schedule);
}

/* --- requests ---------------------------------------------------------------------------------- */

static void give_memory(struct schedule *schedule, struct sent *sent, size_t i)
{
    nvs_piece *piece = &sent->pieces[i];
    size_t whole_nbytes = guarded_nbytes(piece->nbytes);
    unsigned char *whole = arena + schedule->arena_at;
    if (roll(3) == 0 || schedule->arena_at + whole_nbytes > ARENA_NBYTES)
        whole = sent->heap[i] = malloc(whole_nbytes);
    else
        schedule->arena_at += whole_nbytes;
    require(whole, "no memory");
    piece->memory = guarded(whole, piece->nbytes);
    if (sent->direction == NVS_WRITE)
        fill(piece->memory, piece->nbytes);
    else
        memset(piece->memory, POISON, piece->nbytes);
}

static void check_failures(const struct schedule *schedule, const struct sent *sent,
                           int32_t *statuses)
{
    nvs_failure failures[PIECE_LIMIT + 1];
    size_t count = nvs_request_failures(sent->request, failures, PIECE_LIMIT + 1);
    uint64_t failure_count;
    require(nvs_request_wait(sent->request, 0, &failure_count) == 0 && failure_count == count,
            "the number of failures is wrong");
    for (size_t i = 0; i < count; i++) {
        const nvs_failure *failure = &failures[i];
        require(failure->piece < sent->piece_count && statuses[failure->piece] == 0,
                "a failure of a piece that is none");
        const nvs_piece *piece = &sent->pieces[failure->piece];
        uint64_t end = piece->offset_bytes + piece->nbytes;
        int32_t status = failure->status;
        bool is_errno = status == -EIO || status == -EINVAL || status == -EINTR || status == -EAGAIN
                        || (status == -ENOSPC && sent->direction == NVS_WRITE);
        bool is_legal =
            (is_errno && schedule->actions & (ERRNO | REFUSE)) || (status == -EAGAIN && schedule->actions & BUSY)
            || (status == NVS_ERROR_NO_PROGRESS && schedule->actions & SHORT)
            || (status == NVS_ERROR_CANCELLED && sent->cancelled)
            || (status == NVS_ERROR_END_OF_FILE && sent->direction == NVS_READ
                && end > sent->model->nbytes);
        if (!is_legal)
            fprintf(stderr, "status %d\n", status);
        require(is_legal, "a failure that nothing can have caused");
        require(failure->done_nbytes < piece->nbytes + (sent->cancelled ? 0 : 1)
                    && failure->error_offset_bytes >= piece->offset_bytes
                    && failure->error_offset_bytes < end, "a failure beside its piece");
        statuses[failure->piece] = status;
    }
}

/* Of a request that is over. */
static void collect(struct schedule *schedule, struct sent *sent)
{
    int32_t statuses[PIECE_LIMIT] = {0};
    if (sent->over)
        return;
    sent->over = true;
    if (sent->request) {
        require(nvs_request_done(sent->request) == 1, "a request is not over");
        check_failures(schedule, sent, statuses);
        nvs_request_release(sent->request);
    }
    for (size_t i = 0; i < sent->piece_count; i++) {
        const nvs_piece *piece = &sent->pieces[i];
        bool is_known = sent->request && statuses[i] == 0;
        require(guards_hold(piece), "bytes beside the memory were written");
        if (sent->direction == NVS_WRITE && is_known)
            model_note(sent->model, piece);
        if (sent->direction == NVS_READ && is_known) {
            require(piece->nbytes == 0 || piece->offset_bytes + piece->nbytes <= sent->model->nbytes,
                    "bytes beyond the end of the file were read");
            require(model_equals(sent->model, piece->memory, piece->offset_bytes, piece->nbytes,
                                 schedule->actions & FLIP), "wrong bytes were read");
        }
    }
    model_end(sent->model, sent->direction, sent->pieces, sent->piece_count);
    for (size_t i = 0; i < sent->piece_count; i++)
        free(sent->heap[i]);
}

static void collect_over(struct schedule *schedule)
{
    for (int i = 0; i < schedule->sent_count; i++) {
        struct sent *sent = &schedule->sent[i];
        if (sent->request && !sent->over && nvs_request_done(sent->request))
            collect(schedule, sent);
    }
}

static void cancel(struct schedule *schedule, struct sent *sent)
{
    require(nvs_engine_cancel(schedule->engine, sent->request) == 0, "cancel fails");
    sent->cancelled = true;
}

static void submit(struct schedule *schedule, struct sent *sent)
{
    nvs_piece pieces[PIECE_LIMIT];
    memcpy(pieces, sent->pieces, sizeof pieces);
    model_begin(sent->model, sent->direction, pieces, sent->piece_count);
    require(nvs_engine_submit(schedule->engine, sent->model->file, sent->direction,
                              (int)roll(NVS_LANE_COUNT), pieces, sent->piece_count,
                              &sent->request) == 0, "submit fails");
    memset(pieces, POISON, sizeof pieces); /* the table need not live */
}

static void send(struct schedule *schedule)
{
    struct model *model = schedule->models[roll((uint64_t)schedule->model_count)];
    if (!model->file)
        return;
    struct sent *sent = &schedule->sent[schedule->sent_count++];
    *sent = (struct sent){.model = model, .direction = (int)roll(2)};
    sent->piece_count = model_place(model, sent->direction, sent->pieces);
    for (size_t i = 0; i < sent->piece_count; i++)
        give_memory(schedule, sent, i);
    submit(schedule, sent);
    uint64_t failure_count;
    switch (roll(16)) {
    case 0: case 1: cancel(schedule, sent); break;
    case 2: nvs_request_wait(sent->request, (int64_t)roll(300000), &failure_count);
            cancel(schedule, sent); break;
    case 3: case 4: case 5:
        require(nvs_request_wait(sent->request, (int64_t)roll(2000000), &failure_count) != -EINTR,
                "a wait was interrupted"); break;
    case 6: nvs_request_release(sent->request); sent->request = NULL; break;
    default: break;
    }
}

/* --- one schedule ------------------------------------------------------------------------------ */

static void release_file(struct model *model)
{
    if (model->file)
        nvs_file_release(model->file);
    model->file = NULL;
}

/* All is waited for first, and the engine must then be as new. */
static void end_in_order(struct schedule *schedule)
{
    bool any_forgotten = false;
    for (int i = 0; i < schedule->sent_count; i++) {
        struct sent *sent = &schedule->sent[i];
        uint64_t failure_count;
        any_forgotten |= !sent->request;
        if (sent->over || !sent->request)
            continue;
        require(nvs_request_wait(sent->request, -1, &failure_count) == 0, "a wait fails");
        collect(schedule, sent);
    }
    nvs_stats stats;
    require(nvs_engine_stats(schedule->engine, &stats) == 0, "no statistics");
    require(any_forgotten || stats.in_flight_count == 0,
            "a request is still counted as in flight");
    if (any_forgotten)
        return;
    require(nvs_engine_unregister_memory(schedule->engine, arena, ARENA_NBYTES) == 0,
            "memory is not unregistered");
    for (int i = 0; i < schedule->model_count; i++)
        release_file(schedule->models[i]);
    for (int i = 0; i < 5000 && schedule->engine->file_table->any_gone; i++)
        usleep(1000);
    require(!schedule->engine->file_table->any_gone,
            "a file that is released stays in the kernel's table");
}

/* After a close that timed out the engine still serves cancels. */
static void close_engine(struct schedule *schedule)
{
    int64_t timeout_ns = roll(2) ? -1 : (int64_t)roll(300000);
    int rc;
    while ((rc = nvs_engine_close(schedule->engine, timeout_ns)) == -ETIMEDOUT) {
        struct sent *sent = &schedule->sent[roll(REQUEST_LIMIT)];
        if (sent->request && !sent->over && roll(4) == 0)
            cancel(schedule, sent);
    }
    require(rc == 0, "close fails");
}

static void run(const char *folder, bool takes_any_alignment)
{
    static struct schedule schedule;
    static struct model models[FILE_LIMIT];
    memset(&schedule, 0, sizeof schedule);
    roll_from(number);
    open_engine(&schedule);
    schedule.model_count = 1 + (int)roll(FILE_LIMIT);
    for (int i = 0; i < schedule.model_count; i++) {
        char path[512];
        snprintf(path, sizeof path, "%s/%d-%d.swp", folder, (int)getpid(), i);
        schedule.models[i] = &models[i];
        model_open(&models[i], path, takes_any_alignment);
        unlink(path);
    }
    for (uint64_t count = 1 + roll(REQUEST_LIMIT); count > 0; count--) {
        send(&schedule);
        if (roll(2))
            collect_over(&schedule);
        if (roll(16) == 0)
            release_file(schedule.models[roll((uint64_t)schedule.model_count)]);
        if (roll(16) == 0)
            register_memory(&schedule);
        if (schedule.is_script && roll(16) == 0) {
            char script[128];
            make_script(&schedule, script, sizeof script);
            require(nvs_engine_inject(schedule.engine, script) == 0, "inject fails");
        }
    }
    if (schedule.is_script && schedule.actions & NEVER)
        require(nvs_engine_inject(schedule.engine, "") == 0, "inject fails");
    if (roll(2))
        end_in_order(&schedule);
    else if (roll(2))
        for (int i = 0; i < schedule.sent_count; i++)
            if (schedule.sent[i].request && !schedule.sent[i].over)
                cancel(&schedule, &schedule.sent[i]);
    close_engine(&schedule);
    for (int i = 0; i < schedule.sent_count; i++)
        collect(&schedule, &schedule.sent[i]);
    bool compares = roll(4) == 0;
    for (int i = 0; i < schedule.model_count; i++) {
        release_file(schedule.models[i]);
        require(model_close(schedule.models[i], compares), "wrong bytes are in the file");
    }
}

int main(int argument_count, char **arguments)
{
    require(argument_count == 4, "usage: native_schedules FOLDER FIRST COUNT");
    unsigned long first = strtoul(arguments[2], NULL, 10);
    unsigned long count = strtoul(arguments[3], NULL, 10);
    struct statfs facts;
    require(statfs(arguments[1], &facts) == 0, "no such folder");
    require(posix_memalign((void **)&arena, 4096, ARENA_NBYTES) == 0, "no memory");
    signal(SIGALRM, tell_hang);
    size_t heap_nbytes = 0;
    for (number = first; number < first + count; number++) {
        alarm(WATCHDOG_S);
        int descriptor_count = count_descriptors();
        run(arguments[1], facts.f_type == TMPFS);
        require(count_descriptors() == descriptor_count, "descriptors are left");
        if (number == first + WARM_UP)
            heap_nbytes = mallinfo2().uordblks;
    }
    if (count > WARM_UP + 1)
        require(mallinfo2().uordblks < heap_nbytes + LEAK_NBYTES, "the heap has grown");
    free(arena);
    printf("%lu schedules\n", count);
    return 0;
}
