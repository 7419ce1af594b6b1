#ifndef NVS_DIGEST_H
#define NVS_DIGEST_H

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DIGEST_HAS_AVX2
/* nvs_digest for processors that have AVX2. */
uint64_t digest_avx2(const void *memory, uint64_t nbytes, uint64_t seed);
#endif

#endif
