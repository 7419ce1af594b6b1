/* Checksums of memory: XXH3 in its 64-bit form, from libxxhash's header. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "backend.h"

uint64_t nvs_digest(const void *memory, uint64_t nbytes, uint64_t seed)
{
    return XXH3_64bits_withSeed(memory, nbytes, seed);
}

void nvs_digest_pieces(const nvs_piece *pieces, size_t piece_count, uint64_t *digests)
{
    for (size_t i = 0; i < piece_count; i++)
        digests[i] = nvs_digest(pieces[i].memory, pieces[i].nbytes, 0);
}
