/* The order of service: demand, then prefetch and writeback side by side.
 *
 * Facts (docs/design.md has the figures). What is in the kernel is not overtaken, so a demand read
 * waits for all of it: behind 32 MiB of background it takes 22 to 25 times its time, behind 4 MiB 2.2
 * to 2.7 times. But 4 MiB in flight cost a pure stream of writes 8 to 14 % of its speed, and 2 MiB
 * reads and writes side by side up to 18 %. So the limit holds for a second after each demand: a
 * demand that comes after a quiet second waits for a full queue, some 10 ms, once; that is 1 % of the
 * time at most, and a run whose reads are all foreseen pays nothing. */
#include "engine.h"
#include "split.h"

/* A limit that one block fills would leave the drive idle between two. */
enum { BACKGROUND_BLOCKS = 4 };
static const int64_t DEMAND_IS_RECENT_NS = 1000000000;

void lane_append(struct lane *lane, struct lane *more)
{
    if (!more->head)
        return;
    *(lane->head ? &lane->tail->next : &lane->head) = more->head;
    lane->tail = more->tail;
    more->head = more->tail = NULL;
}

void lane_remove(struct lane *lane, nvs_request *request)
{
    nvs_request *previous = NULL;
    nvs_request *at = lane->head;
    for (; at && at != request; at = at->next)
        previous = at;
    if (!at)
        return;
    *(previous ? &previous->next : &lane->head) = request->next;
    if (lane->tail == request)
        lane->tail = previous;
}

/* Of the two background lanes the one with less in flight, so that neither starves. */
static struct lane *choose_background(nvs_engine *engine)
{
    struct lane *prefetch = &engine->lanes[NVS_PREFETCH];
    struct lane *writeback = &engine->lanes[NVS_WRITEBACK];
    if (!prefetch->head || !writeback->head)
        return prefetch->head ? prefetch : writeback->head ? writeback : NULL;
    return prefetch->in_flight_nbytes <= writeback->in_flight_nbytes ? prefetch : writeback;
}

void lane_note_demand(nvs_engine *engine)
{
    engine->demand_recent_until_ns = monotonic_ns() + DEMAND_IS_RECENT_NS;
}

struct lane *lane_choose(nvs_engine *engine, uint64_t *most_nbytes)
{
    struct lane *demand = &engine->lanes[NVS_DEMAND];
    struct lane *background = choose_background(engine);
    *most_nbytes = engine->block_nbytes;
    if (!background)
        return demand->head ? demand : NULL;
    bool demand_is_under_way = demand->head || demand->in_flight_nbytes > 0;
    if (!demand_is_under_way && monotonic_ns() > engine->demand_recent_until_ns)
        return background;
    uint64_t limit_nbytes = engine->background_nbytes;
    uint64_t share_nbytes = round_up(limit_nbytes / BACKGROUND_BLOCKS, BLOCK_MULTIPLE_NBYTES);
    if (share_nbytes > engine->block_nbytes)
        share_nbytes = engine->block_nbytes;
    uint64_t in_flight_nbytes = engine->lanes[NVS_PREFETCH].in_flight_nbytes
                                + engine->lanes[NVS_WRITEBACK].in_flight_nbytes;
    /* Beside a demand, however long, the background keeps one block in flight: it never stands. */
    bool is_alone = in_flight_nbytes == 0 && (!demand->head || demand->in_flight_nbytes > 0);
    bool has_room = !demand_is_under_way && in_flight_nbytes + share_nbytes <= limit_nbytes;
    if (!is_alone && !has_room)
        return demand->head ? demand : NULL;
    *most_nbytes = share_nbytes;
    return background;
}
