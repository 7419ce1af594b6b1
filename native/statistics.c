/* What the engine counts, as callers read it. */
#include "engine.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Three bits below the leading one: a bucket is an eighth of its power of two wide. */
void count_latency(nvs_engine *engine, int lane, int64_t took_ns)
{
    uint64_t ns = took_ns < 8 ? 8 : (uint64_t)took_ns;
    unsigned power = 63 - (unsigned)__builtin_clzll(ns);
    unsigned bucket = power * 8 + (unsigned)(ns >> (power - 3) & 7);
    atomic_fetch_add_explicit(&engine->latencies[lane][bucket], 1, memory_order_relaxed);
}

int nvs_engine_latency(nvs_engine *engine, int32_t lane, uint64_t *counts)
{
    if (engine->pid != getpid())
        return NVS_ERROR_FORKED;
    for (int i = 0; i < NVS_LATENCY_BUCKET_COUNT; i++)
        counts[i] = atomic_load_explicit(&engine->latencies[lane][i], memory_order_relaxed);
    return 0;
}

static struct device_report report_of(const nvs_engine *engine)
{
    struct device_report report = {0};
    if (engine->backend->report)
        engine->backend->report(engine->backend_state, &report);
    return report;
}

int nvs_engine_stats(nvs_engine *engine, nvs_stats *stats)
{
    if (engine->pid != getpid())
        return NVS_ERROR_FORKED;
    struct device_report report = report_of(engine);
    uint64_t values[COUNTER_COUNT + 2];
    for (int i = 0; i < COUNTER_COUNT; i++)
        values[i] = atomic_load_explicit(&engine->counters[i], memory_order_relaxed);
    values[COUNTER_COUNT] = report.gpudirect_nbytes;
    values[COUNTER_COUNT + 1] = report.bounced_nbytes;
    _Static_assert(sizeof values == sizeof *stats, "a counter for every field, in the same order");
    memcpy(stats, values, sizeof *stats);
    return 0;
}

int nvs_engine_gds_refusal(nvs_engine *engine, char *reason, size_t reason_nbytes)
{
    if (engine->pid != getpid())
        return NVS_ERROR_FORKED;
    struct device_report report = report_of(engine);
    if (!report.refusal)
        return 0;
    snprintf(reason, reason_nbytes, "%s", report.refusal);
    return 1;
}
