#define _GNU_SOURCE
#include "event.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

void event_set(event *event)
{
    atomic_store_explicit(event, 1, memory_order_release);
    syscall(SYS_futex, event, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

int event_wait(event *event, int64_t timeout_ns)
{
    int64_t now_ns = monotonic_ns();
    int64_t deadline_ns = timeout_ns < INT64_MAX - now_ns ? now_ns + timeout_ns : INT64_MAX;
    struct timespec deadline = {deadline_ns / 1000000000, deadline_ns % 1000000000};

    while (!atomic_load_explicit(event, memory_order_acquire)) {
        /* Unlike FUTEX_WAIT, the bitset form takes an absolute time, on CLOCK_MONOTONIC. */
        long rc = syscall(SYS_futex, event, FUTEX_WAIT_BITSET_PRIVATE, 0,
                          timeout_ns < 0 ? NULL : &deadline, NULL, FUTEX_BITSET_MATCH_ANY);
        if (rc != 0 && (errno == ETIMEDOUT || errno == EINTR)) {
            int reason = errno;
            return atomic_load_explicit(event, memory_order_acquire) ? 0 : -reason;
        }
    }
    return 0;
}
