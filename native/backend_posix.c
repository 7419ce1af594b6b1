/* A few threads with preadv and pwritev: works on every filesystem, in every container.
 *
 * The choice where AIO is refused, and on tmpfs, where asynchronous interfaces do the copy inside
 * the submitting call. */
#include "workers.h"

static void posix_move(void *context, uint32_t worker, struct backend_op *op)
{
    (void)context, (void)worker;
    move_by_kernel(op);
}

static int posix_open(void **state, struct backend_options *options)
{
    return workers_open((struct workers **)state, options, "nvmeswap-posix", posix_move, NULL);
}

static const struct backend posix_backend = {
    .abi = BACKEND_ABI,
    .name = "posix",
    .open = posix_open,
    .submit = workers_submit,
    .reap = workers_reap,
    .close = workers_close,
};

static __attribute__((constructor)) void posix_register(void)
{
    backend_register(&posix_backend);
}
