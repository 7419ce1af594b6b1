#ifndef NVS_CUDA_LIBRARY_H
#define NVS_CUDA_LIBRARY_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* NVIDIA's libraries, found at run time: neither building nor importing needs them. Loaded once a
 * process and kept. Names and numbers are those of the CUDA driver API and the cuFile API. */

enum {
    CUDA_POINTER_CONTEXT = 1, CUDA_POINTER_MEMORY_TYPE = 2, CUDA_POINTER_DEVICE_ORDINAL = 9,
    CUDA_MEMORY_OF_DEVICE = 2,
    CUDA_HOST_PORTABLE = 1,       /* page-locked for every context */
    CUDA_STREAM_NON_BLOCKING = 1, /* not ordered with the legacy stream, where others compute */
};

/* Each returns a CUresult, 0 for success. In the order of the names in cuda_library.c. */
struct cuda_library {
    int (*init)(unsigned int flags);
    int (*pointer_attribute)(void *value, int attribute, uint64_t address);
    int (*device)(int *device, int ordinal);
    int (*primary_retain)(void **context, int device);
    int (*primary_release)(int device);
    int (*set_context)(void *context);
    int (*host_allocate)(void **memory, size_t nbytes, unsigned int flags);
    int (*host_free)(void *memory);
    int (*stream_create)(void **stream, unsigned int flags);
    int (*stream_destroy)(void *stream);
    int (*stream_synchronize)(void *stream);
    int (*copy_to_device)(uint64_t device, const void *host, size_t nbytes, void *stream);
    int (*copy_to_host)(void *host, uint64_t device, size_t nbytes, void *stream);
};

struct cufile_error {
    int code; /* CUfileOpError: 0, or above 5000 */
    int cuda_code;
};

struct cufile_descriptor {
    int type;
    union {
        int fd;
        void *handle;
    } file;
    const void *operations;
};

enum { CUFILE_OPAQUE_FD = 1 };

/* In the order of the names in cuda_library.c. */
struct cufile_library {
    struct cufile_error (*open_driver)(void);
    struct cufile_error (*register_handle)(void **handle, struct cufile_descriptor *descriptor);
    void (*deregister_handle)(void *handle);
    struct cufile_error (*register_buffer)(const void *memory, size_t nbytes, int flags);
    struct cufile_error (*deregister_buffer)(const void *memory);
    /* Bytes; -1: errno; below: a negated CUfileOpError. */
    ssize_t (*read)(void *handle, void *memory, size_t nbytes, off_t file_offset_bytes,
                    off_t memory_offset_bytes);
    ssize_t (*write)(void *handle, const void *memory, size_t nbytes, off_t file_offset_bytes,
                     off_t memory_offset_bytes);
};

/* NULL, with the reason in one line. May block. Any thread. */
const struct cuda_library *cuda_library_load(char *reason, size_t reason_nbytes);

/* As above. The driver of cuFile is opened with it, once a process, which wants a current context. */
const struct cufile_library *cufile_library_load(char *reason, size_t reason_nbytes);

#endif
