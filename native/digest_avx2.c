/* digest.c's work, compiled for AVX2; a file of its own, because the header is made for one target. */
#include "digest.h"

#ifdef DIGEST_HAS_AVX2
#pragma GCC optimize("O3")
#pragma GCC target("avx2")
#define XXH_INLINE_ALL
#include <xxhash.h>

uint64_t digest_avx2(const void *memory, uint64_t nbytes, uint64_t seed)
{
    return XXH3_64bits_withSeed(memory, nbytes, seed);
}
#endif
