/* Alone in including linux/stat.h, which clashes with sys/stat.h. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/stat.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "interface.h"

int nvs_probe_alignment(const char *path, uint32_t *memory_alignment_nbytes,
                        uint32_t *offset_alignment_nbytes)
{
#ifdef STATX_DIOALIGN
    struct statx facts;
    if (syscall(SYS_statx, AT_FDCWD, path, 0, STATX_DIOALIGN, &facts) < 0)
        return -errno;
    if (!(facts.stx_mask & STATX_DIOALIGN) || facts.stx_dio_offset_align == 0)
        return -EOPNOTSUPP;
    *memory_alignment_nbytes = facts.stx_dio_mem_align;
    *offset_alignment_nbytes = facts.stx_dio_offset_align;
    return 0;
#else
    (void)path, (void)memory_alignment_nbytes, (void)offset_alignment_nbytes;
    return -EOPNOTSUPP;
#endif
}
