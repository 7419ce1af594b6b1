#ifndef NVS_SPLIT_H
#define NVS_SPLIT_H

#include <stdint.h>

/* Arithmetic of blocks: no I/O, no state.
 *
 * Example: a direct read of 2_500_000 bytes, blocks of 1 MiB, alignment 4096.
 *   blocks      1_048_576 + 1_048_576 + 402_848, memory aligned
 *   last block  402_848 is no multiple of 4096: 401_408 are read in place, and the tail as a block of
 *               its own: 4096 bytes into a bounce buffer, of which 1440 are copied out
 *   short       the first block comes back with 10_000 of 1_048_576 bytes: progress counts down to
 *               8192, so the next try starts there and asks for 1_040_384
 *   end         the tail comes back with 1500 of 4096, as the file ends there: the wanted 1440 are in
 *   stuck       a try that moves 1000 bytes ends where it began, and would for ever: an error */

uint64_t round_down(uint64_t nbytes, uint64_t alignment_nbytes);
uint64_t round_up(uint64_t nbytes, uint64_t alignment_nbytes);

/* Size of the block that starts where `cut_nbytes` of a request are already cut. */
uint32_t split_next_nbytes(uint64_t request_nbytes, uint64_t cut_nbytes, uint64_t block_nbytes);

enum split_verdict { SPLIT_FINISHED, SPLIT_RESUME, SPLIT_STUCK };

/* A block of which `*done_nbytes` were done moved `moved_nbytes` more. It is finished once
 * `needed_nbytes` are done; else `*done_nbytes` becomes the aligned place to resume from. */
enum split_verdict split_progress(uint32_t *done_nbytes, uint64_t moved_nbytes,
                                  uint32_t needed_nbytes, uint32_t alignment_nbytes);

#endif
