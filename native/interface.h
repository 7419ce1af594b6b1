/* All that Python sees of the engine. cffi reads this very file, hence no #include and no guard:
 * C code includes it once, mostly through backend.h.
 *
 * Every call that returns an int returns 0 (or a count) or a negative code: a negated errno, or one
 * of enum nvs_error. Every call may be made from any thread; only the nvs_*_wait and
 * nvs_engine_close calls block, and only as long as their timeout says, and registering memory. */

enum nvs_direction { NVS_READ = 0, NVS_WRITE = 1 };

enum nvs_lane { NVS_DEMAND = 0, NVS_PREFETCH = 1, NVS_WRITEBACK = 2, NVS_LANE_COUNT = 3 };

enum nvs_direct_mode {
    NVS_DIRECT_OFF = 0,     /* the page cache is used from the start */
    NVS_DIRECT_PREFER = 1,  /* O_DIRECT, until the filesystem refuses an aligned block (EINVAL) */
    NVS_DIRECT_REQUIRE = 2, /* O_DIRECT; a refusal is an error of that request */
};

/* Outside the range of errno. */
enum nvs_error {
    NVS_ERROR_END_OF_FILE = -10001, /* a read met the end of the file within the wanted bytes */
    NVS_ERROR_NO_PROGRESS = -10002, /* a transfer succeeded without moving an aligned amount */
    NVS_ERROR_FORKED = -10003,      /* the caller is a forked child; the engine is the parent's */
    NVS_ERROR_CLOSED = -10004,      /* the engine accepts nothing any more */
    NVS_ERROR_CANCELLED = -10005,   /* dropped before it went to the drive */
};

typedef struct nvs_engine nvs_engine;
typedef struct nvs_file nvs_file;
typedef struct nvs_request nvs_request;

typedef struct {
    const char *backend;      /* "uring", "aio", "posix", "gds", "skeleton", or "fault" (over aio) */
    const char *fault_script; /* NULL, or the faults to inject over `backend`: see fault_script.h */
    uint64_t block_nbytes;    /* largest single transfer: a multiple of 4096, below 2 GiB */
    uint64_t background_nbytes; /* most in flight of prefetch and writeback while demand is recent */
    uint32_t queue_depth;     /* most blocks in the kernel at once */
    uint32_t thread_count;    /* threads of the backends posix and gds */
} nvs_options;

/* Most members of a file, and most stripes in a row of it. */
enum { NVS_MEMBER_LIMIT = 16, NVS_STRIPE_LIMIT = 64 };

/* How a file is laid over its members: see stripe.h. */
typedef struct {
    const uint32_t *weights; /* of each member: stripes a row */
    uint32_t member_count;
    uint64_t stripe_nbytes; /* a multiple of the file's offset alignment; of no account with one */
} nvs_stripes;

typedef struct {
    int fd;
    int32_t direct_mode; /* enum nvs_direct_mode */
} nvs_member;

/* What a request is made of: bytes of one file, anywhere in memory. */
typedef struct {
    void *memory;
    uint64_t offset_bytes; /* aligned to the file's offset alignment if it is direct or striped */
    uint64_t nbytes;       /* a direct write also zeroes the extent up to its offset alignment */
} nvs_piece;

typedef struct {
    uint64_t piece;              /* its index, as submitted */
    int32_t status;              /* a negative code: why */
    uint32_t tries;              /* of the failed block, since it last made progress */
    uint64_t done_nbytes;        /* wanted bytes in blocks that succeeded */
    uint64_t error_offset_bytes; /* in the file: where the first failure stopped */
} nvs_failure;

/* Fields in the order of nvmeswap.stats.EngineStats. */
typedef struct {
    uint64_t read_direct_nbytes;
    uint64_t read_buffered_nbytes;
    uint64_t write_direct_nbytes;
    uint64_t write_buffered_nbytes;
    uint64_t bounced_nbytes;
    uint64_t request_count;
    uint64_t block_count;
    uint64_t retry_count;
    uint64_t error_count;
    uint64_t in_flight_count;
    uint64_t registered_nbytes;
    uint64_t queue_depth; /* what the kernel granted */
    uint64_t gpudirect_nbytes; /* between files and device memory by cuFile */
    uint64_t device_bounced_nbytes; /* the same through page-locked memory */
} nvs_stats;

/* Requests are counted by how long they took, from submit to end: eight buckets for each power of
 * two of nanoseconds. Bucket i begins at 2^(i / 8) * (1 + i % 8 / 8) ns. */
enum { NVS_LATENCY_BUCKET_COUNT = 512 };

/* NULL on failure: then *status is the code, and reason says in one line what was refused. */
nvs_engine *nvs_engine_open(const nvs_options *options, int32_t *status, char *reason,
                            size_t reason_nbytes);

/* Accepts nothing more, drains, joins the thread and frees the engine. -ETIMEDOUT: a transfer may
 * still land, so engine and requests stay (the caller keeps the memory too) and close may be called
 * again. -EINTR: a signal arrived; call again. In a forked child: does nothing, NVS_ERROR_FORKED. */
int nvs_engine_close(nvs_engine *engine, int64_t timeout_ns);

/* Starts one request of any number of pieces, in any order; those to be written must not overlap.
 * Neighbours in the file are moved together. A piece that fails leaves the others alone. The memory
 * and the file must live until the request is finished; the table need not. *request is the
 * caller's to release. */
int nvs_engine_submit(nvs_engine *engine, nvs_file *file, int32_t direction, int32_t lane,
                      const nvs_piece *pieces, size_t piece_count, nvs_request **request);

/* Drops what has not gone to the drive; the request is finished once the rest has landed. */
int nvs_engine_cancel(nvs_engine *engine, nvs_request *request);

/* Pins memory for cheaper transfers, in pieces as large as memlock lets through. (The backend gds makes
 * device memory known, and no other.) Returns how many bytes from the start were registered: fewer than
 * asked, or none, is no failure; the rest is moved as any memory. It must stay mapped until it is
 * unregistered or the engine is closed. Blocks while the kernel pins: some ms a GiB. */
int64_t nvs_engine_register_memory(nvs_engine *engine, void *memory, uint64_t nbytes);

/* Of all pieces within these bytes, when no transfer uses them. */
int nvs_engine_unregister_memory(nvs_engine *engine, void *memory, uint64_t nbytes);

int nvs_engine_stats(nvs_engine *engine, nvs_stats *stats);

/* 1 with the reason in one line if cuFile was refused and is not used any more, else 0. */
int nvs_engine_gds_refusal(nvs_engine *engine, char *reason, size_t reason_nbytes);

/* Fills NVS_LATENCY_BUCKET_COUNT counts. */
int nvs_engine_latency(nvs_engine *engine, int32_t lane, uint64_t *counts);

/* Replaces the script of an engine opened with one; counting starts anew. -EINVAL: not understood;
 * -ENOTSUP: the engine has no fault backend. */
int nvs_engine_inject(nvs_engine *engine, const char *fault_script);

/* Takes over the members' descriptors. The alignments are powers of two, the memory's at most 4096,
 * and the strictest of the members'. NULL when memory is short. */
nvs_file *nvs_file_new(const nvs_member *members, const nvs_stripes *stripes,
                       uint32_t offset_alignment_nbytes, uint32_t memory_alignment_nbytes);

/* Is the member direct now? If it fell back, *fallback_errno says why, else it is 0. */
int nvs_file_is_direct(nvs_file *file, uint32_t member, int32_t *fallback_errno);

/* Closes the descriptors as soon as no request needs them. */
void nvs_file_release(nvs_file *file);

/* 1 or 0, or NVS_ERROR_FORKED. Never blocks. */
int nvs_request_done(nvs_request *request);

/* 0 with *failure_count filled, -ETIMEDOUT, -EINTR (call again), NVS_ERROR_FORKED. A negative timeout
 * waits for ever. May be repeated, before and after the end. */
int nvs_request_wait(nvs_request *request, int64_t timeout_ns, uint64_t *failure_count);

/* Of a finished request: the pieces that failed, in no order. Returns how many were filled in. */
size_t nvs_request_failures(nvs_request *request, nvs_failure *failures, size_t capacity);

/* On CLOCK_MONOTONIC; *finished_ns is -1 while it is under way. Never blocks. */
void nvs_request_times(nvs_request *request, int64_t *submitted_ns, int64_t *finished_ns);

void nvs_request_release(nvs_request *request);

/* How many of the first nbytes of a file laid out so the member holds. */
uint64_t nvs_stripe_share(const nvs_stripes *stripes, uint32_t member, uint64_t nbytes);

/* The member that holds the byte at an offset, and where in it. */
uint32_t nvs_stripe_find(const nvs_stripes *stripes, uint64_t offset_bytes,
                         uint64_t *member_offset_bytes);

/* Direct I/O alignment as statx tells it, by path. -EOPNOTSUPP: the kernel or the filesystem does not
 * say; that does not mean that there is no direct I/O. */
int nvs_probe_alignment(const char *path, uint32_t *memory_alignment_nbytes,
                        uint32_t *offset_alignment_nbytes);

/* XXH3 (64 bit) of memory, started from `seed`. */
uint64_t nvs_digest(const void *memory, uint64_t nbytes, uint64_t seed);

/* The same of each piece of memory, from seed 0. */
void nvs_digest_pieces(const nvs_piece *pieces, size_t piece_count, uint64_t *digests);

/* An fp32 master without loss as its bf16 parameter (rounded to the nearest, ties to even; a NaN is
 * 0xffff), the 16 bits of its lower half as rest, and a carry: element i's in bit i % 8 of byte
 * i / 8, unused bits 0. No two overlap; any address will do. */
void nvs_split_master(const void *master, void *parameter, void *rest, uint8_t *carries,
                      size_t numel);

/* The master that was split, bit for bit; a NaN as another NaN, its upper half being 0xffff. */
void nvs_join_master(const void *parameter, const void *rest, const uint8_t *carries, void *master,
                     size_t numel);
