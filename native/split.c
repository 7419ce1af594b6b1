#include "split.h"

uint64_t round_down(uint64_t nbytes, uint64_t alignment_nbytes)
{
    return nbytes & ~(alignment_nbytes - 1);
}

uint64_t round_up(uint64_t nbytes, uint64_t alignment_nbytes)
{
    return round_down(nbytes + alignment_nbytes - 1, alignment_nbytes);
}

uint32_t split_next_nbytes(uint64_t request_nbytes, uint64_t cut_nbytes, uint64_t block_nbytes)
{
    uint64_t left_nbytes = request_nbytes - cut_nbytes;
    return (uint32_t)(left_nbytes < block_nbytes ? left_nbytes : block_nbytes);
}

enum split_verdict split_progress(uint32_t *done_nbytes, uint64_t moved_nbytes,
                                  uint32_t needed_nbytes, uint32_t alignment_nbytes)
{
    uint64_t reached_nbytes = *done_nbytes + moved_nbytes;
    if (reached_nbytes >= needed_nbytes) {
        *done_nbytes = needed_nbytes;
        return SPLIT_FINISHED;
    }
    uint32_t resume_nbytes = (uint32_t)round_down(reached_nbytes, alignment_nbytes);
    if (resume_nbytes <= *done_nbytes)
        return SPLIT_STUCK;
    *done_nbytes = resume_nbytes;
    return SPLIT_RESUME;
}
