#include "stripe.h"

#include <assert.h>

void stripe_lay_out(struct stripe_layout *layout, const uint32_t *weights, uint32_t member_count,
                    uint64_t stripe_nbytes)
{
    assert(member_count > 0 && member_count <= NVS_MEMBER_LIMIT);
    *layout = (struct stripe_layout){.stripe_nbytes = stripe_nbytes};
    for (uint32_t member = 0; member < member_count; member++) {
        assert(weights[member] > 0 && weights[member] <= NVS_STRIPE_LIMIT - layout->row_count);
        layout->weights[member] = (uint8_t)weights[member];
        layout->row_count += weights[member];
    }
    if (member_count == 1)
        layout->row_count = 1;
    /* Each stripe goes to whoever is furthest behind its share of the row so far. */
    uint8_t given[NVS_MEMBER_LIMIT] = {0};
    for (uint32_t stripe = 0; stripe < layout->row_count; stripe++) {
        uint32_t chosen = 0;
        int32_t chosen_behind = INT32_MIN;
        for (uint32_t member = 0; member < member_count; member++) {
            int32_t behind = (int32_t)(layout->weights[member] * (stripe + 1))
                             - (int32_t)(given[member] * layout->row_count);
            if (given[member] < layout->weights[member] && behind > chosen_behind) {
                chosen = member;
                chosen_behind = behind;
            }
        }
        layout->members[stripe] = (uint8_t)chosen;
        layout->member_stripes[stripe] = given[chosen]++;
    }
}

struct stripe_place stripe_find(const struct stripe_layout *layout, uint64_t offset_bytes)
{
    if (layout->row_count == 1)
        return (struct stripe_place){0, offset_bytes, UINT64_MAX};
    uint64_t stripe = offset_bytes / layout->stripe_nbytes;
    uint64_t within_bytes = offset_bytes % layout->stripe_nbytes;
    uint64_t row = stripe / layout->row_count;
    uint32_t at = (uint32_t)(stripe % layout->row_count);
    uint32_t member = layout->members[at];
    uint64_t before = row * layout->weights[member] + layout->member_stripes[at];
    return (struct stripe_place){member, before * layout->stripe_nbytes + within_bytes,
                                 layout->stripe_nbytes - within_bytes};
}

uint64_t stripe_share(const struct stripe_layout *layout, uint32_t member, uint64_t nbytes)
{
    if (layout->row_count == 1)
        return nbytes;
    uint64_t row_nbytes = layout->row_count * layout->stripe_nbytes;
    uint64_t share_nbytes = nbytes / row_nbytes * layout->weights[member] * layout->stripe_nbytes;
    uint64_t left_nbytes = nbytes % row_nbytes;
    for (uint32_t at = 0; left_nbytes > 0; at++) {
        uint64_t here_nbytes =
            left_nbytes < layout->stripe_nbytes ? left_nbytes : layout->stripe_nbytes;
        if (layout->members[at] == member)
            share_nbytes += here_nbytes;
        left_nbytes -= here_nbytes;
    }
    return share_nbytes;
}

/* --- for Python -------------------------------------------------------------------------------- */

uint64_t nvs_stripe_share(const nvs_stripes *stripes, uint32_t member, uint64_t nbytes)
{
    struct stripe_layout layout;
    stripe_lay_out(&layout, stripes->weights, stripes->member_count, stripes->stripe_nbytes);
    return stripe_share(&layout, member, nbytes);
}

uint32_t nvs_stripe_find(const nvs_stripes *stripes, uint64_t offset_bytes,
                         uint64_t *member_offset_bytes)
{
    struct stripe_layout layout;
    stripe_lay_out(&layout, stripes->weights, stripes->member_count, stripes->stripe_nbytes);
    struct stripe_place place = stripe_find(&layout, offset_bytes);
    *member_offset_bytes = place.offset_bytes;
    return place.member;
}
