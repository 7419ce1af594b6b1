#ifndef NVS_EVENT_H
#define NVS_EVENT_H

#include <stdatomic.h>
#include <stdint.h>

/* A one-shot event in one word: 0 until set. The setter's earlier writes are visible to whoever saw
 * the event set. */
typedef atomic_uint event;

void event_set(event *event);

/* 0, -ETIMEDOUT or -EINTR; a negative timeout waits for ever. */
int event_wait(event *event, int64_t timeout_ns);

int64_t monotonic_ns(void);

#endif
