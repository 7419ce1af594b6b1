#ifndef NVS_LANES_H
#define NVS_LANES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend.h"

/* Which request gets the next block. */

struct nvs_engine;

struct lane {
    nvs_request *head;
    nvs_request *tail;
    uint64_t in_flight_nbytes; /* in blocks that are cut and not retired */
};

/* Moves all of `more` behind what is there. */
void lane_append(struct lane *lane, struct lane *more);

void lane_remove(struct lane *lane, nvs_request *request);

/* A demand block is on its way, or over. */
void lane_note_demand(struct nvs_engine *engine);

/* The lane to cut the next block from, or NULL; most_nbytes is the largest that it may be. */
struct lane *lane_choose(struct nvs_engine *engine, uint64_t *most_nbytes);

#endif
