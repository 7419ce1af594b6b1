#ifndef NVS_STRIPE_H
#define NVS_STRIPE_H

#include <stdint.h>

#include "backend.h"

/* Where a byte of a striped file lies: arithmetic, no I/O, no state.
 *
 * A file of several members is a repeating row of stripes. Of each row a member has as many stripes
 * as its weight, spread evenly over the row, and they lie in the member one behind the other.
 *
 * Example: weights 3, 2, 1; stripes of 1 MiB. A row is 6 MiB, and its stripes are members
 *   0 1 0 2 1 0
 * Offset 8 MiB + 5000 of the file is in row 1, stripe 2, byte 5000 of it. That stripe is member 0's
 * second in the row, and member 0 has 3 a row, so it lies in member 0 at
 *   (1 * 3 + 1) MiB + 5000
 * and the next byte that is elsewhere is 1 MiB - 5000 further on.
 * Of the first 8 MiB member 0 holds 3 MiB of row 0 and 1 MiB of row 1, member 1 the 2 and 1, member 2
 * the 1 and 0. */

struct stripe_layout {
    uint64_t stripe_nbytes;
    uint32_t row_count; /* stripes in a row; 1: one member, no stripes */
    uint8_t weights[NVS_MEMBER_LIMIT];
    uint8_t members[NVS_STRIPE_LIMIT];       /* of each stripe in the row */
    uint8_t member_stripes[NVS_STRIPE_LIMIT]; /* of the same member, before it in the row */
};

struct stripe_place {
    uint32_t member;
    uint64_t offset_bytes; /* in the member */
    uint64_t left_nbytes;  /* to the end of the stripe */
};

/* Each weight is at least 1, and together they are at most NVS_STRIPE_LIMIT. */
void stripe_lay_out(struct stripe_layout *layout, const uint32_t *weights, uint32_t member_count,
                    uint64_t stripe_nbytes);

struct stripe_place stripe_find(const struct stripe_layout *layout, uint64_t offset_bytes);

/* How many of the file's first nbytes the member holds. */
uint64_t stripe_share(const struct stripe_layout *layout, uint32_t member, uint64_t nbytes);

#endif
