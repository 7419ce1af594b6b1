#ifndef NVS_MASTER_H
#define NVS_MASTER_H

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MASTER_HAS_AVX2
/* nvs_split_master and nvs_join_master for processors that have AVX2, of as many elements from the
 * start as fill whole vectors. They return how many: a multiple of 8. */
size_t split_avx2(const void *master, void *parameter, void *rest, uint8_t *carries, size_t numel);
size_t join_avx2(const void *parameter, const void *rest, const uint8_t *carries, void *master,
                 size_t numel);
#endif

#endif
