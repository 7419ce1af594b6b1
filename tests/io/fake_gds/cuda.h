#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <stddef.h>
#include <stdint.h>

/* Where the bytes of device memory really are; NULL if it is none. Addresses of device memory itself
 * can't be read or written, as on a GPU. */
char *fake_cuda_shadow(uint64_t address, size_t nbytes);

/* The calling thread's context, or NULL. */
void *fake_cuda_current(void);

/* The number that the script in an environment variable gives to a word ("handle=5030 read=-5"), or
 * `otherwise`. */
long fake_script(const char *variable, const char *word, long otherwise);

#endif
